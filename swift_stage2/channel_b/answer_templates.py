"""The ways in which a data set may write its answers, and which of them it is: learned from channel A's answers.

``templates_of`` lists every rendering: code fence, white space, key order, escapes, how coordinates are written. An
answer shows which of them write it, character by character; the one that is learned writes all answers, so that both
channels teach one format. Pure text, and no slow import: whoever has no model calls it as well.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product

from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.channel_b.targets import AnswerTemplate, Objects
from swift_stage2.errors import ConfigError, DatasetError
from swift_stage2.records import Coordinates

_NUM_CHARACTERS_SHOWN = 160
_FENCES = ("", "```json\n", "```\n")
_INDENTS = ("  ", "    ", "\t")
_COORDINATES = ("{}", "<|coord_{}|>", '"<|coord_{}|>"')
_PLACEHOLDER = re.compile("<ref-object>|<bbox>")


@dataclass(frozen=True, slots=True)
class PossibleTemplates:
    """Those of a dialect's templates that write one answer, or several, exactly as they stand. False if none does."""

    dialect: Dialect
    bits: int
    """Bit n stands for the n-th of ``templates_of(dialect)``."""

    def __bool__(self) -> bool:
        return self.bits != 0

    def __and__(self, other: PossibleTemplates) -> PossibleTemplates:
        return PossibleTemplates(self.dialect, self.bits & other.bits)

    @property
    def likeliest(self) -> AnswerTemplate:
        """The first of those that differ least from the dialect's standard: what no answer shows is as that has it."""
        standard = standard_template(self.dialect)

        def num_different(template: AnswerTemplate) -> int:
            # An answer without objects stands in the fence of the others.
            alike = replace(template, empty=standard.empty)
            return sum(one != other for one, other in zip(astuple(alike), astuple(standard), strict=True))

        possible = [own for n, own in enumerate(templates_of(self.dialect)) if self.bits >> n & 1]
        return min(possible, key=num_different)


@cache
def templates_of(dialect: Dialect) -> tuple[AnswerTemplate, ...]:
    """Every rendering of a dialect, those that are written most often first."""
    options = product(
        _FENCES,
        _white_spaces(),
        (" ", ""),
        (True, False),
        _COORDINATES,
        (False, True),
        (1, 0) if dialect.named else (1,),
    )
    written = (_template(dialect, *chosen) for chosen in options)
    return tuple(
        dict.fromkeys(
            replace(template, empty=empty)
            for template in written
            for empty in (template.empty, dialect.opener + dialect.closer)
        )
    )


def _all(dialect: Dialect) -> PossibleTemplates:
    return PossibleTemplates(dialect, (1 << len(templates_of(dialect))) - 1)


@cache
def standard_template(dialect: Dialect) -> AnswerTemplate:
    """The template of the dialect's example: how it is written where no answer shows anything else.

    Raises:
        ConfigError: no template writes the example.
    """
    shown = require_templates(dialect.example, dialect).bits
    return templates_of(dialect)[(shown & -shown).bit_length() - 1]


def possible_templates(text: str, dialect: Dialect, among: int | None = None) -> PossibleTemplates:
    """The templates, of the bits ``among``, that write ``text``: channel A's answer without the end of turn."""
    bits, among = 0, _all(dialect).bits if among is None else among
    if objects := _objects(text, dialect):
        for beginning, templates in _by_beginning(dialect).items():
            if text.startswith(beginning):
                bits |= sum(own for each, own in templates if own & among and _writes(each, objects, text))
    elif objects is not None:
        bits = sum(1 << n for n, template in enumerate(templates_of(dialect)) if template.empty == text)
    return PossibleTemplates(dialect, bits & among)


def require_templates(text: str, dialect: Dialect) -> PossibleTemplates:
    """The same. Raises ConfigError: no template of this dialect writes the answer; shows both texts."""
    if shown := possible_templates(text, dialect):
        return shown
    objects = [(each.label, each.box) for each in parse_rollout(text, dialect).objects]
    renderings = (template.write(objects) for template in templates_of(dialect))
    raise refusal(dialect, text, max(renderings, key=lambda own: _first_difference(text, own)))


def common_templates(
    counts: Mapping[PossibleTemplates, int], dialect: Dialect
) -> tuple[PossibleTemplates, tuple[PossibleTemplates, ...]]:
    """The templates that write most answers, and what those show that none of them writes.

    Args:
        counts: of how many answers ``possible_templates`` gave the same; among equals the first counts more.
        dialect: where there are no answers all of its templates are possible.
    """
    common = _all(dialect)
    others: list[PossibleTemplates] = []
    for shown, _ in Counter(counts).most_common():
        if both := common & shown:
            common = both
        else:
            others.append(shown)
    return common, tuple(others)


def learn_template(texts: Iterable[str], dialect: Dialect) -> AnswerTemplate:
    """The template of all answers; the same answers, in any order, give the same template.

    Raises:
        ConfigError: as ``require_templates`` does.
        DatasetError: an answer is written otherwise than those before it; shows both texts.
    """
    common = _all(dialect)
    for text in texts:
        alike = possible_templates(text, dialect, among=common.bits)
        if not alike:
            require_templates(text, dialect)
            own = common.likeliest.write(_objects(text, dialect) or ())
            raise DatasetError(
                "all answers must be written alike",
                got=f"{_both_texts(text, own)} as the rows before it are",
                remedy="write the answers of all rows in one way (code fence, key order, white space, escapes)",
            )
        common = alike
    return common.likeliest


def fill_placeholders(content: str, objects: Sequence[tuple[str, Sequence[float]]]) -> str:
    """An answer as ms-swift's template renders it with QWENVL_BBOX_FORMAT=new, but for what boxes are measured in.

    A placeholder without an object stays as it is.
    """
    labels, boxes = iter([label for label, _ in objects]), iter([list(map(round, box)) for _, box in objects])

    def fill(match: re.Match[str]) -> str:
        return str(next(labels if match[0] == "<ref-object>" else boxes, match[0]))

    return _PLACEHOLDER.sub(fill, content)


def refusal(dialect: Dialect, text: str, own: str) -> ConfigError:
    """Why channel A's answer is refused, with ``own``, which channel B would write instead."""
    return ConfigError(
        "stage2_ab.channel_b.target.dialect must be the format of channel A's answers",
        got=f"dialect={dialect} {_both_texts(text, own)}",
        remedy=(
            "set the other dialect, mend the data set's answers (placeholders <bbox> and <ref-object>; no quote or "
            "line break in a label), or set QWENVL_BBOX_FORMAT=new"
        ),
    )


@dataclass(frozen=True, slots=True)
class _WhiteSpace:
    begin: str  # behind the container's bracket
    between: str  # behind the comma between two objects
    end: str  # before the container's closing bracket
    inside: str  # behind an object's bracket
    member: str  # behind the comma between its two members
    outside: str  # before the object's closing bracket
    first: str  # behind the bracket of its coordinates
    coordinate: str  # behind the comma between two of them
    last: str  # before their closing bracket


def _white_spaces() -> Iterator[_WhiteSpace]:
    """On one line, an object per line, and as ``json.dumps`` indents, with the coordinates on one line or not."""
    in_lines = [("\n" + indent, "\n" + indent, "\n") for indent in ("", *_INDENTS)]
    containers = [("", " ", ""), ("", "", ""), *in_lines, ("", "\n", ""), ("", "\n ", "")]
    coordinates = [("", " ", ""), ("", "", "")]
    for container, member, of_box in product(containers, (" ", ""), coordinates):
        yield _WhiteSpace(*container, "", member, "", *of_box)
    for indent in _INDENTS:
        one, two, three = ("\n" + indent * depth for depth in (1, 2, 3))
        for of_box in (*coordinates, (three, three, two)):
            yield _WhiteSpace(one, one, "\n", two, two, one, *of_box)


def _template(
    dialect: Dialect,
    fence: str,
    space: _WhiteSpace,
    behind_key: str,
    box_first: bool,
    coordinate: str,
    ensure_ascii: bool,
    first_number: int,
) -> AnswerTemplate:
    label = f'"{dialect.label_key}":{behind_key}"', '"'
    box = f'"{dialect.box_key}":{behind_key}[{space.first}', f"{space.last}]"
    before, after = (box, label) if box_first else (label, box)
    end_of_fence = "\n```" if fence else ""
    return AnswerTemplate(
        dialect=dialect,
        head=f"{fence}{dialect.opener}{space.begin}",
        opener=(f'":{behind_key}' if dialect.named else "") + "{" + space.inside + before[0],
        box_first=box_first,
        coordinate=coordinate,
        coordinate_separator=f",{space.coordinate}",
        middle=f"{before[1]},{space.member}{after[0]}",
        closer=f"{after[1]}{space.outside}",
        tail=f"{space.end}{dialect.closer}{end_of_fence}",
        first_number=first_number,
        separator=f",{space.between}",
        empty=f"{fence}{dialect.opener}{dialect.closer}{end_of_fence}",
        ensure_ascii=ensure_ascii,
    )


@cache
def _by_beginning(dialect: Dialect) -> dict[str, list[tuple[AnswerTemplate, int]]]:
    """Those that write objects differently, with their bits, by what stands before the first value."""
    bits: defaultdict[AnswerTemplate, int] = defaultdict(int)
    for n, template in enumerate(templates_of(dialect)):
        bits[replace(template, empty="")] |= 1 << n
    found: defaultdict[str, list[tuple[AnswerTemplate, int]]] = defaultdict(list)
    for template, own in bits.items():
        found[template.head + template.opening(0)].append((template, own))
    return dict(found)


def _objects(text: str, dialect: Dialect) -> list[tuple[str, Coordinates]] | None:
    """The objects that an answer lists; None if it does not list them whole."""
    parsed = parse_rollout(text, dialect)
    if parsed.dropped or not parsed.is_whole:
        return None
    return [(each.label, each.box) for each in parsed.objects]


def _writes(template: AnswerTemplate, objects: Objects, text: str) -> bool:
    """True if ``text`` is what the template writes; a look at the first object spares writing most that are not."""
    first = template.head + template.object_at(0, objects[0]) + template.behind(0, len(objects))
    return text.startswith(first) and template.write(objects) == text


def _both_texts(text: str, own: str) -> str:
    """Channel A's answer and what channel B would write, around the first place where they differ."""
    differs = _first_difference(text, own)
    start = max(
        0, min(differs - _NUM_CHARACTERS_SHOWN // 2, max(len(text), len(own)) - _NUM_CHARACTERS_SHOWN)
    )
    shown, other = (each[start : start + _NUM_CHARACTERS_SHOWN] for each in (text, own))
    return f"answer={shown!r} (from character {start}), which channel B would write {other!r}"


def _first_difference(text: str, own: str) -> int:
    pairs = enumerate(zip(text, own, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(text), len(own)))
