"""Reads objects, strictly: those that a row lists as its truth, and those that the model named in an answer.

Text is never repaired. A bad object of an answer is dropped alone, with the first reason that applies; a tail that was
cut off is dropped without one. Commas and space between objects only separate them: one too many or too few spoils no
object. The grammar is RFC 8259, plus coordinate tokens as bare values and the NaN and Infinity that Python writes. No
text of the model raises, nothing recurses, and every character is looked at a bounded number of times.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swift_stage2.channel_b.dialects import DIALECTS, END_OF_TURN, OBJECT_LIST, Dialect
from swift_stage2.errors import SampleError
from swift_stage2.records import Box, ObjectDropReason

IntegerBox = tuple[int, int, int, int]

_SEPARATORS = re.compile(r"[ \t\n\r,]*+")
_OBJECT_NAME = re.compile(r"object_[0-9]+")
# A hundred digits are more than any image needs, and few enough to square in floating point.
_DIGITS = r"(?:0|[1-9][0-9]{0,99})"
_INTEGER = re.compile(f"-?{_DIGITS}")
_COORDINATE_TOKEN = re.compile(rf"<\|coord_({_DIGITS})\|>")


@dataclass(frozen=True, slots=True)
class TrueObjects:
    """The objects of an image, as its row says them: boxes are x1, y1, x2, y2 in the row's own units."""

    labels: tuple[str, ...]
    boxes: tuple[Box, ...]

    def __len__(self) -> int:
        return len(self.boxes)


def lists_objects(row: Mapping[str, Any]) -> bool:
    """True if the row lists the objects of its image, even none. Channel B cannot use any other row."""
    objects = row.get("objects")
    return isinstance(objects, Mapping) and objects.get("bbox") is not None


def read_ground_truth(row: Mapping[str, Any]) -> TrueObjects:
    """A row's ``objects``, in their own order; there may be none.

    Raises:
        SampleError: no list of boxes, an object without box or label, a box that is not four ordered numbers.
    """
    objects = row.get("objects")
    if not lists_objects(row) or not isinstance(objects, Mapping):
        raise SampleError(
            f"a row needs objects={{'ref': [...], 'bbox': [...]}}, got {objects or 'none'}; write empty lists for an "
            "image without objects, or stage2_ab.channel_b.rows_without_objects: channel_a_only"
        )
    labels, boxes = objects.get("ref") or [], objects.get("bbox") or []
    if not (isinstance(labels, Sequence) and isinstance(boxes, Sequence)) or isinstance(labels, str):
        raise SampleError("objects.ref and objects.bbox must be lists, got another type")
    if len(labels) != len(boxes):
        raise SampleError(
            f"every object needs one label and one box, got num_ref={len(labels)} num_bbox={len(boxes)}"
        )
    if any(not isinstance(label, str) or not label.strip() for label in labels):
        raise SampleError("every label in objects.ref must be non-empty text")
    return TrueObjects(tuple(label.strip() for label in labels), tuple(_read_true_box(box) for box in boxes))


def _read_true_box(box: Any) -> Box:
    numbers = box if isinstance(box, Sequence) and not isinstance(box, str) else ()
    if len(numbers) != 4 or not all(_is_number(number) for number in numbers):
        raise SampleError(f"a box must be four numbers x1, y1, x2, y2, got bbox={box}")
    x1, y1, x2, y2 = (float(number) for number in numbers)
    if not (0 <= x1 <= x2 < math.inf and 0 <= y1 <= y2 < math.inf):
        raise SampleError(f"a box must have 0 <= x1 <= x2 and 0 <= y1 <= y2, got bbox={box}")
    return x1, y1, x2, y2


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_LEXEME = re.compile(
    _SPACE
    + rf"(?:(?P<key>{_STRING}){_SPACE}:"
    + rf"|(?P<string>{_STRING})"
    + r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)"
    + r"|(?P<token><\|coord_[0-9]++\|>)"
    + r"|(?P<mark>[{}\[\],])"
    + r"|(?P<word>true|false|null|NaN|-?Infinity))"
)
_KEY = re.compile(rf"({_STRING}){_SPACE}:{_SPACE}")
# Where a malformed element ends depends on brackets and commas outside strings; a string that is itself
# malformed still hides what stands between its quotes.
_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],"]', re.DOTALL)
_OPENER_OF = {"}": "{", "]": "["}


class Atom(NamedTuple):
    """A value without parts. ``kind`` is string, number, token or word; ``lexeme`` is its text."""

    kind: str
    lexeme: str


@dataclass(slots=True)
class Members:
    """The members of a JSON object in text order, repeated keys included."""

    pairs: list[tuple[str, Value]] = field(default_factory=list)


Value = Atom | Members | list["Value"]


def decode_string(lexeme: str) -> str:
    """The text of a well-formed JSON string literal."""
    return str(json.loads(lexeme)) if "\\" in lexeme else lexeme[1:-1]


def read_key(text: str, position: int) -> tuple[str, int] | None:
    """A member's key and the position of its value, or None where no well-formed key stands."""
    match = _KEY.match(text, position)
    return (decode_string(match[1]), match.end()) if match else None


def read_object(text: str, position: int) -> tuple[Members, int] | None:
    """The object that opens at ``position`` and the position after it; None if it is malformed or cut."""
    root = Members()
    stack: list[Members | list[Value]] = [root]
    key: str | None = None  # read, and still without its value
    position += 1
    after_value = after_comma = False
    while stack:
        match = _LEXEME.match(text, position)
        if match is None:
            return None
        position = match.end()
        kind = str(match.lastgroup)
        lexeme = match[kind]
        top = stack[-1]
        if lexeme == "]" or lexeme == "}":
            if after_comma or key is not None or isinstance(top, Members) != (lexeme == "}"):
                return None
            stack.pop()
            after_value = True
        elif after_value:
            if lexeme != ",":
                return None
            after_value, after_comma = False, True
        elif isinstance(top, Members) and key is None:
            if kind != "key":
                return None
            key, after_comma = decode_string(lexeme), False
        elif kind == "key" or lexeme == ",":
            return None
        else:
            value: Value = Members() if lexeme == "{" else [] if lexeme == "[" else Atom(kind, lexeme)
            if isinstance(top, Members):
                top.pairs.append((str(key), value))
            else:
                top.append(value)
            key, after_comma, after_value = None, False, isinstance(value, Atom)
            if not isinstance(value, Atom):
                stack.append(value)
    return root, position


def skip_element(text: str, position: int, closer: str) -> int | None:
    """The position where the element at ``position`` ends, or None if the text ends before it does.

    An element that opens a bracket ends after the bracket that balances it. Any other ends in front of
    the next comma or of the container's ``closer``. Inside, a closing bracket ends everything opened
    since its own opener; one that nothing opened is skipped.
    """
    bracketed = text[position] in "{["
    stack: list[str] = []
    open_counts = {"{": 0, "[": 0}
    while match := _STRUCTURE.search(text, position):
        position = match.end()
        mark = match[0]
        if mark == '"':
            return None  # a string that never ends
        if mark in open_counts:
            stack.append(mark)
            open_counts[mark] += 1
        elif not stack and mark in (",", closer):
            return match.start()
        elif mark in _OPENER_OF and open_counts[_OPENER_OF[mark]]:
            opened = ""
            while opened != _OPENER_OF[mark]:
                opened = stack.pop()
                open_counts[opened] -= 1
            if bracketed and not stack:
                return position
    return None
