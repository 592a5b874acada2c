"""How a data set spells its answers: code fence, key order, separators, escapes. Learned from channel A's answers.

``read_format`` takes from one answer what it shows, ``learn_format`` joins what many show. A learned format writes
every answer that it was learned from again, character by character: both channels teach one format. Which objects an
answer lists is the parser's to say. Pure text, and no slow import: whoever has no model calls it as well.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache

from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.targets import SPACE, AnswerFormat, Objects
from swift_stage2.errors import ConfigError, DatasetError, SampleError

_NUM_CHARACTERS_SHOWN = 160
_S = f"[{SPACE}]*+"
_DIGITS = "(?:0|[1-9][0-9]{0,99})"
_INTEGER = re.compile(_DIGITS)
_COORDINATE = re.compile(rf'"<\|coord_{_DIGITS}\|>"|<\|coord_{_DIGITS}\|>|{_DIGITS}')
_PLACEHOLDER = re.compile("<ref-object>|<bbox>")
_SEPARATOR = re.compile(f"{_S},{_S}")
_RULE = "stage2_ab.channel_b.target.dialect must be the format of channel A's answers"
_REMEDY = (
    "set the other dialect, mend the data set's answers (placeholders <bbox> and <ref-object>; no quote or line break "
    "in a label), or set QWENVL_BBOX_FORMAT=new"
)


@cache
def standard_format(dialect: Dialect) -> AnswerFormat:
    """How a dialect is written where no answer shows anything else: ``json.dumps``, without a fence."""
    return replace(read_format(dialect.example, dialect), seen=frozenset())


def read_format(text: str, dialect: Dialect) -> AnswerFormat:
    """The format as far as one answer shows it; ``text`` is channel A's answer without the end of turn.

    Raises:
        ConfigError: the answer is nothing that this dialect can write; shows both texts.
    """
    return _read(text, dialect)[0]


def join_formats(
    counts: Mapping[AnswerFormat, int], dialect: Dialect
) -> tuple[AnswerFormat, tuple[AnswerFormat, ...]]:
    """The format that most answers show together, and those that contradict it.

    Args:
        counts: of how many answers ``read_format`` gave each format; among equals the first counts more.
        dialect: what none of them shows is as ``standard_format`` of it has it.
    """
    joint = standard_format(dialect)
    others: list[AnswerFormat] = []
    for shown, _ in Counter(counts).most_common():
        if (more := joint.joined(shown)) is None:
            others.append(shown)
        else:
            joint = more
    return joint, tuple(others)


def learn_format(texts: Iterable[str], dialect: Dialect) -> AnswerFormat:
    """The format of all answers; the same answers give the same format.

    Raises:
        ConfigError: as ``read_format`` does.
        DatasetError: two answers are written in two ways; shows both.
    """
    counts: Counter[AnswerFormat] = Counter()
    examples: dict[AnswerFormat, str] = {}
    for text in texts:
        shown = read_format(text, dialect)
        counts[shown] += 1
        examples.setdefault(shown, text)
    learned, others = join_formats(counts, dialect)
    for other in others:
        text = examples[other]
        if (own := learned.write(_read(text, dialect)[1])) != text:
            raise DatasetError(
                "all answers must be written alike",
                got=f"{_both_texts(text, own)} as most rows are written",
                remedy="write the answers of all rows in one way (code fence, key order, white space, escapes)",
            )
    return learned


def fill_placeholders(content: str, objects: Sequence[tuple[str, Sequence[float]]]) -> str:
    """An answer as ms-swift's template renders it with QWENVL_BBOX_FORMAT=new, but for what boxes are measured in.

    A placeholder without an object stays as it is.
    """
    labels, boxes = iter([label for label, _ in objects]), iter([list(map(round, box)) for _, box in objects])

    def fill(match: re.Match[str]) -> str:
        return str(next(labels if match[0] == "<ref-object>" else boxes, match[0]))

    return _PLACEHOLDER.sub(fill, content)


def _read(text: str, dialect: Dialect) -> tuple[AnswerFormat, Objects]:
    """The format that an answer shows, and the objects that it lists. Raises ConfigError as ``read_format`` does."""
    found = _find_container(text, dialect)
    if found is None:
        raise ConfigError(
            _RULE,
            got=f"dialect={dialect} answer={_shorten(text)!r}, which should read like {dialect.example!r}",
            remedy=_REMEDY,
        )
    shown, objects = found
    try:
        own = shown.write(objects)
    except SampleError as error:
        raise ConfigError(_RULE, got=f"dialect={dialect} answer={_shorten(text)!r}: {error}") from error
    if own != text:
        raise refusal(dialect, text, own)
    return shown, objects


def _find_container(text: str, dialect: Dialect) -> tuple[AnswerFormat, Objects] | None:
    start = text.find(dialect.opener) + 1
    if start == 0:
        return None
    first = _skip_space(text, start)
    if text.startswith(dialect.closer, first):
        return replace(standard_format(dialect), empty=text, seen=frozenset({"empty"})), ()
    for box_first in (False, True):
        if found := _find_objects(text, first, dialect, box_first):
            return found
    return None


def _find_objects(
    text: str, first: int, dialect: Dialect, box_first: bool
) -> tuple[AnswerFormat, Objects] | None:
    pattern = _object_pattern(dialect, box_first)
    found: list[re.Match[str]] = []
    separators: list[str] = []
    position = first
    while match := pattern.match(text, position):
        found.append(match)
        position = match.end()
        if (comma := _SEPARATOR.match(text, position)) is None:
            break
        separators.append(comma[0])
        position = comma.end()
    if not found or not text.startswith(dialect.closer, _skip_space(text, found[-1].end())):
        return None
    try:
        labels = [str(json.loads(f'"{match["label"]}"')) for match in found]
    except ValueError:
        return None
    one = found[0]
    before, after = ("box", "label") if box_first else ("label", "box")
    escapes = [
        escaped[1:-1] == match["label"]
        for match, label in zip(found, labels, strict=True)
        if (escaped := json.dumps(label)) != json.dumps(label, ensure_ascii=False)
    ]
    unseen = {
        "seen",
        "empty",
        *(() if separators else ("separator",)),
        *(() if escapes else ("ensure_ascii",)),
    }
    shown = AnswerFormat(
        dialect=dialect,
        head=text[:first],
        opener=text[one.end("name") if dialect.named else one.start() : one.start(before)],
        box_first=box_first,
        coordinate=_INTEGER.sub("{}", _COORDINATE.findall(one["box"])[0]),
        coordinate_separator=_SEPARATOR.findall(one["box"])[0],
        middle=text[one.end(before) : one.start(after)],
        closer=text[one.end(after) : one.end()],
        tail=text[found[-1].end() :],
        first_number=int(one["number"]) if dialect.named else 1,
        separator="".join(separators[:1]),
        ensure_ascii=escapes[:1] == [True],
        seen=frozenset(field.name for field in fields(AnswerFormat)) - unseen,
    )
    boxes = [[int(number) for number in _INTEGER.findall(match["box"])] for match in found]
    return shown, tuple(zip(labels, boxes, strict=True))


@cache
def _object_pattern(dialect: Dialect, box_first: bool) -> re.Pattern[str]:
    name = rf'(?P<name>"object_(?P<number>{_DIGITS}))"{_S}:{_S}' if dialect.named else ""
    label = rf'"{dialect.label_key}"{_S}:{_S}"(?P<label>(?:[^"\\]++|\\.)*+)"'
    coordinate = _COORDINATE.pattern
    more = rf"(?:{_S},{_S}(?:{coordinate})){{{dialect.num_coordinates - 1}}}"
    box = rf'"{dialect.box_key}"{_S}:{_S}\[{_S}(?P<box>(?:{coordinate}){more}){_S}\]'
    members = f"{_S},{_S}".join((box, label) if box_first else (label, box))
    return re.compile(rf"{name}\{{{_S}{members}{_S}\}}", re.DOTALL)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in SPACE:
        position += 1
    return position


def refusal(dialect: Dialect, text: str, own: str) -> ConfigError:
    """Why channel A's answer is refused, with ``own``, which channel B would write instead."""
    return ConfigError(_RULE, got=f"dialect={dialect} {_both_texts(text, own)}", remedy=_REMEDY)


def _both_texts(text: str, own: str) -> str:
    """Channel A's answer and what channel B would write, around the first place where they differ."""
    pairs = zip(text, own, strict=False)
    differs = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(own)))
    start = max(
        0, min(differs - _NUM_CHARACTERS_SHOWN // 2, max(len(text), len(own)) - _NUM_CHARACTERS_SHOWN)
    )
    return (
        f"answer={_shorten(text, start)!r} (from character {start}), which channel B would write "
        f"{_shorten(own, start)!r}"
    )


def _shorten(text: str, start: int = 0) -> str:
    return text[start : start + _NUM_CHARACTERS_SHOWN]
