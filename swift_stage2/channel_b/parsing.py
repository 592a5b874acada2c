"""Turns what the model said into predicted objects, strictly: text is never repaired.

A bad object is dropped alone, with the first reason that applies; a tail that was cut off is dropped
without one. Commas and space between objects only separate them: one too many or too few spoils no
object. Never raises on any text, never recurses, linear in its length. Called by the pipeline.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swift_stage2.channel_b.dialects import DIALECTS, END_OF_TURN, OBJECT_LIST, Dialect
from swift_stage2.channel_b.object_reader import (
    Atom,
    Members,
    Value,
    decode_string,
    read_key,
    read_object,
    skip_element,
)
from swift_stage2.records import ObjectDropReason

IntegerBox = tuple[int, int, int, int]

_SEPARATORS = re.compile(r"[ \t\n\r,]*+")
_OBJECT_NAME = re.compile(r"object_[0-9]+")
# A hundred digits are more than any image needs, and few enough to square in floating point.
_DIGITS = r"(?:0|[1-9][0-9]{0,99})"
_INTEGER = re.compile(f"-?{_DIGITS}")
_COORDINATE_TOKEN = re.compile(rf"<\|coord_({_DIGITS})\|>")


@dataclass(frozen=True, slots=True)
class PredictedObject:
    """One object that the model named: a stripped label and x1, y1, x2, y2 in the template's space."""

    label: str
    box: IntegerBox


@dataclass(frozen=True, slots=True, eq=False)
class DropCounts(Mapping[ObjectDropReason, int]):
    """Dropped objects by reason, reasons that occurred only. Immutable, and equal to the same plain dict."""

    _counts: Mapping[ObjectDropReason, int]

    def __getitem__(self, reason: ObjectDropReason) -> int:
        return self._counts[reason]

    def __iter__(self) -> Iterator[ObjectDropReason]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """The objects of one answer in text order, what was dropped, and whether its container never closed."""

    objects: tuple[PredictedObject, ...]
    dropped: DropCounts
    truncated: bool


def parse_rollout(text: str, dialect: str | Dialect = OBJECT_LIST) -> ParsedRollout:
    """Reads an answer of the model.

    The container starts at the dialect's first bracket. Text before it, after it and after the end of
    the turn is ignored. An answer without a container is truncated unless it is empty.

    Raises:
        ValueError: the dialect is unknown. No text raises.
    """
    syntax = dialect if isinstance(dialect, Dialect) else _dialect_named(dialect)
    answer = text.partition(END_OF_TURN)[0]
    start = answer.find(syntax.opener)
    if start < 0:
        return ParsedRollout((), DropCounts({}), truncated=bool(answer))
    objects: list[PredictedObject] = []
    dropped: Counter[ObjectDropReason] = Counter()
    names: set[str] = set()
    position = start + 1
    truncated = True
    while element := _read_element(answer, position, syntax):
        if element.is_closer:
            truncated = False
            break
        position = element.end
        outcome = _judge_element(element, names, syntax)
        if isinstance(outcome, PredictedObject):
            objects.append(outcome)
        else:
            dropped[outcome] += 1
    return ParsedRollout(tuple(objects), DropCounts(dict(dropped)), truncated)


def _dialect_named(name: str) -> Dialect:
    if name not in DIALECTS:
        raise ValueError(f"a dialect must be known, got dialect={name!r}; use one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


@dataclass(frozen=True, slots=True)
class _Element:
    """One element of the container, or its closer. ``members`` is None for what is not an object."""

    end: int
    name: str | None = None
    members: Members | None = None
    is_closer: bool = False


def _read_element(text: str, position: int, syntax: Dialect) -> _Element | None:
    """The next element of the container, or None if the text ends before the element does."""
    if match := _SEPARATORS.match(text, position):
        position = match.end()
    if position == len(text):
        return None
    if text[position] == syntax.closer:
        return _Element(position + 1, is_closer=True)
    name = None
    if syntax.named:
        key = read_key(text, position)
        if key is None:
            return _skip(text, position, syntax, None)
        name, position = key
        if position == len(text):
            return None
    if text.startswith("{", position) and (found := read_object(text, position)):
        members, end = found
        return _Element(end, name, members)
    return _skip(text, position, syntax, name)


def _skip(text: str, position: int, syntax: Dialect, name: str | None) -> _Element | None:
    end = skip_element(text, position, syntax.closer)
    return None if end is None else _Element(end, name)


def _judge_element(element: _Element, names: set[str], syntax: Dialect) -> PredictedObject | ObjectDropReason:
    """The object, or the first reason against it; remembers the element's name."""
    repeated = element.name in names
    if element.name is not None:
        names.add(element.name)
    if element.members is None:
        return ObjectDropReason.NOT_AN_OBJECT
    if syntax.named and (repeated or not _OBJECT_NAME.fullmatch(element.name or "")):
        return ObjectDropReason.UNEXPECTED_KEY
    return _judge_members(element.members, syntax)


def _judge_members(members: Members, syntax: Dialect) -> PredictedObject | ObjectDropReason:
    values = dict(members.pairs)
    if len(values) < len(members.pairs) or not values.keys() <= {syntax.label_key, syntax.box_key}:
        return ObjectDropReason.UNEXPECTED_KEY
    if syntax.box_key not in values:
        return ObjectDropReason.MISSING_BOX
    coordinates = values[syntax.box_key]
    if not isinstance(coordinates, list) or len(coordinates) != 4:
        return ObjectDropReason.WRONG_ARITY
    box = _read_box(coordinates)
    if box is None:
        return ObjectDropReason.INVALID_BOX
    label = values.get(syntax.label_key)
    text = decode_string(label.lexeme).strip() if isinstance(label, Atom) and label.kind == "string" else ""
    return PredictedObject(text, box) if text else ObjectDropReason.MISSING_LABEL


def _read_box(coordinates: list[Value]) -> IntegerBox | None:
    """Four coordinates of one kind, in order and not negative, or None."""
    found = [_read_coordinate(value) for value in coordinates]
    if len({kind for kind, _ in found}) > 1 or found[0][0] == "other":
        return None
    x1, y1, x2, y2 = (value for _, value in found)
    return (x1, y1, x2, y2) if 0 <= x1 <= x2 and 0 <= y1 <= y2 else None


def _read_coordinate(value: Value) -> tuple[str, int]:
    """(integer | token | other, its value)."""
    if isinstance(value, Atom):
        if value.kind == "number" and _INTEGER.fullmatch(value.lexeme):
            return "integer", int(value.lexeme)
        lexeme = decode_string(value.lexeme) if value.kind == "string" else value.lexeme
        if value.kind in ("string", "token") and (match := _COORDINATE_TOKEN.fullmatch(lexeme)):
            return "token", int(match[1])
    return "other", 0
