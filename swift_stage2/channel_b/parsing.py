"""Reads objects, strictly: those that a row lists as its truth, and those that the model named in an answer.

Text is never repaired. A bad object of an answer is dropped alone, with the first reason that applies; a tail that was
cut off is dropped without one. Text beside the list spoils nothing in it. Commas and space between objects only
separate them: one too many or too few spoils no object. Brackets say where an object ends; what stands between them is
then read as Python reads JSON, coordinate tokens taken for strings. No text of the model raises, and every character is
looked at a bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from swift_stage2.channel_b.dialects import END_OF_TURN, OBJECT_LIST, Dialect, is_in_order
from swift_stage2.errors import SampleError
from swift_stage2.records import Coordinates, ObjectDropReason

_MOST_PIXELS = 1e9  # a true coordinate beyond is none

_SEPARATORS = re.compile(r"[ \t\n\r,]*+")
_OBJECT_NAME = re.compile(r"object_[0-9]+")
# A hundred digits are more than any image needs, and few enough to square in floating point.
_MOST_DIGITS = 100
_COORDINATE_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,99})\|>")
_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_KEY = re.compile(rf"({_STRING}){_SPACE}:{_SPACE}")
# Where an element ends depends on brackets and commas outside strings; a string that is itself malformed still hides
# what stands between its quotes.
_ANY_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRUCTURE = re.compile(_ANY_STRING + r'|[{}\[\],"]', re.DOTALL)
_STRING_OR_TOKEN = re.compile(_ANY_STRING + r"|<\|coord_[0-9]++\|>", re.DOTALL)
_OPENER_OF = {"}": "{", "]": "["}
# Of an object that was read: text alone counts, without its quotes.
_KEY_OR_VALUE = re.compile(
    rf'"(?P<text>{_ANY_STRING[1:-1]})"|\[[^\]]*+\]|(?P<token><\|coord_[0-9]++\|>)', re.DOTALL
)
_COORDINATE = re.compile(r"<\|coord_[0-9]++\|>|[0-9]++")
_ALONE = re.compile(r"\s*+(?:\x00|```\w*+\s*+\x00\s*+```)\s*+")  # the container is a zero


@dataclass(frozen=True, slots=True)
class TrueObjects:
    """The objects of an image, as its row says them: boxes x1, y1, x2, y2, or points x, y, in the row's own units."""

    labels: tuple[str, ...]
    boxes: tuple[tuple[float, ...], ...]

    def __len__(self) -> int:
        return len(self.boxes)


def lists_objects(row: Mapping[str, Any]) -> bool:
    """True if the row lists the objects of its image, even none. Channel B cannot use any other row."""
    objects = row.get("objects")
    return isinstance(objects, Mapping) and objects.get("bbox") is not None


def read_ground_truth(row: Mapping[str, Any], num_coordinates: int = 4) -> TrueObjects:
    """A row's ``objects``, in their own order; there may be none. Points stand in ``bbox``, too, as ms-swift has it.

    Raises:
        SampleError: no list of boxes, an object without box or label, a box that is not four ordered numbers, a point
            that is not two, objects of several images or of another than the first.
    """
    objects = row.get("objects")
    if not lists_objects(row) or not isinstance(objects, Mapping):
        raise SampleError(
            "a row needs objects={'ref': [...], 'bbox': [...]}",
            got=objects or "none",
            remedy="write empty lists for an "
            "image without objects, or stage2_ab.channel_b.rows_without_objects: channel_a_only",
        )
    labels, boxes = objects.get("ref") or [], objects.get("bbox") or []
    if not (isinstance(labels, Sequence) and isinstance(boxes, Sequence)) or isinstance(labels, str):
        raise SampleError("objects.ref and objects.bbox must be lists", got="another type")
    if len(labels) != len(boxes):
        raise SampleError(
            "every object needs one label and one box", got=f"num_ref={len(labels)} num_bbox={len(boxes)}"
        )
    if any(not isinstance(label, str) or not label.strip() for label in labels):
        raise SampleError("every label in objects.ref must be non-empty text")
    image_ids = objects.get("image_id") or []
    if not isinstance(image_ids, Sequence) or any(each != 0 for each in image_ids):
        # Answers do not say in which image a box lies, and evaluate, report and points measure in the first.
        raise SampleError(
            "all objects must lie in the first of a row's images",
            got=f"image_id={image_ids}",
            remedy="write a row for each image, put that image first in images, and write 0",
        )
    read = (_read_coordinates(box, num_coordinates) for box in boxes)
    return TrueObjects(tuple(label.strip() for label in labels), tuple(read))


def _read_coordinates(box: Any, count: int) -> tuple[float, ...]:
    numbers = box if isinstance(box, Sequence) and not isinstance(box, str) else ()
    if len(numbers) != count or not all(type(number) in (int, float) for number in numbers):
        what = (
            "a box must be four numbers x1, y1, x2, y2" if count == 4 else "a point must be two numbers x, y"
        )
        raise SampleError(what, got=f"bbox={box}")
    if not (is_in_order(numbers) and max(numbers) <= _MOST_PIXELS):
        order = "0 <= x1 <= x2 and 0 <= y1 <= y2" if count == 4 else "0 <= x and 0 <= y"
        raise SampleError(
            f"{'a box' if count == 4 else 'a point'} must have {order}",
            got=f"bbox={box}",
            remedy="write x + width and y + height for x2 and y2 if these are its size, or mend or remove the row",
        )
    return tuple(map(float, numbers))


Span: TypeAlias = tuple[int, int]
"""Characters ``start <= i < end`` of an answer."""


@dataclass(frozen=True, slots=True)
class PredictedObject:
    """One object that the model named: a stripped label and x1, y1, x2, y2, or x, y, in the template's space."""

    label: str
    box: Coordinates
    places: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    """Of the label's text, between its quotes, and of each coordinate."""


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """The objects of one answer in text order, what was dropped, and whether its container was closed."""

    objects: tuple[PredictedObject, ...]
    dropped: Mapping[ObjectDropReason, int]
    """From the container, by reason, reasons that occurred only."""
    is_whole: bool
    """True if the answer opened its container and closed it, also where objects in it were dropped."""
    num_outside: int = 0
    """Objects that begin outside of the container: in a second one, or in none."""
    has_text_beside: bool = False
    """True if thoughts or anything but white space and one code fence stand beside the container."""

    @property
    def counted(self) -> tuple[PredictedObject, ...]:
        """The objects that count: none of one that was not read whole."""
        return self.objects if self.is_whole else ()

    @property
    def lost(self) -> dict[str, int]:
        """Everything that the model named and nobody gets, by reason."""
        outside = {ObjectDropReason.OUTSIDE_LIST: self.num_outside} if self.num_outside else {}
        return {str(reason): count for reason, count in (*self.dropped.items(), *outside.items())}


@dataclass(frozen=True, slots=True)
class _Container:
    """What stands between two brackets, characters ``begin <= i < end``."""

    begin: int
    end: int
    read: ParsedRollout
    is_prose: bool
    """True if it is closed and holds something, but nothing that begins as an object does."""


_NO_CONTAINER = _Container(0, 0, ParsedRollout((), {}, is_whole=False), is_prose=True)


def parse_rollout(text: str, dialect: Dialect = OBJECT_LIST) -> ParsedRollout:
    """Reads an answer of the model; no text raises.

    Nothing behind the end of the turn counts. The answer begins behind the last ``</think>``; behind a ``<think>`` that
    never closes it has not begun. Of its containers, as the dialect's brackets make them, the first counts that is
    empty, never closes or holds something that begins as an object does; those before it are prose. Where all are prose
    the first is read, unless an object stands outside of it: then the answer has no list and is not whole.
    """
    said = text.partition(END_OF_TURN)[0]
    thoughts, mark, answer = said.rpartition("</think>")
    start = len(thoughts) + len(mark)
    answer = said[: start + len(answer.partition("<think>")[0])]
    taken, position = _NO_CONTAINER, start
    while taken.is_prose and (position := answer.find(dialect.opener, position)) >= 0:
        container = _read_container(answer, position, dialect)
        position = container.end
        if taken is _NO_CONTAINER or not container.is_prose:
            taken = container
    keys = "|".join(map(re.escape, (dialect.label_key, dialect.box_key)))
    objects = re.compile(rf'\{{{_SPACE}"(?:{keys})"{_SPACE}:').finditer(answer, start)
    num_outside = sum(not taken.begin < each.start() < taken.end for each in objects)
    if num_outside and taken.is_prose:
        taken = _NO_CONTAINER
    is_alone = _ALONE.fullmatch(f"{said[: taken.begin]}\0{said[taken.end :]}")
    return replace(taken.read, num_outside=num_outside, has_text_beside=not is_alone)


def _read_container(answer: str, start: int, dialect: Dialect) -> _Container:
    objects: list[PredictedObject] = []
    dropped: Counter[ObjectDropReason] = Counter()
    names: set[str] = set()
    begins_object = is_prose = False
    position: int | None = start + 1
    while position is not None:
        if match := _SEPARATORS.match(answer, position):
            position = match.end()
        if answer.startswith(dialect.closer, position):
            is_prose = bool(dropped) and not begins_object
            break
        name = None
        if dialect.named and (key := _KEY.match(answer, position)):
            name, position = str(json.loads(key[1])), key.end()
        begins_object |= answer.startswith("{", position) and (name is not None or not dialect.named)
        begin, position = position, _end_of_element(answer, position, dialect.closer)
        if position is None:
            break
        outcome = _read_element(name, answer[begin:position], names, dialect)
        if isinstance(outcome, PredictedObject):
            objects.append(replace(outcome, places=_places(answer, begin, position)))
        else:
            dropped[outcome] += 1
    end = len(answer) if position is None else position + 1
    read = ParsedRollout(tuple(objects), dict(dropped), is_whole=position is not None)
    return _Container(start, end, read, is_prose)


def _read_element(
    name: str | None, element: str, names: set[str], dialect: Dialect
) -> PredictedObject | ObjectDropReason:
    """The object, or the first reason against it; remembers the element's name."""
    repeated = name in names
    if name is not None:
        names.add(name)
    members = _read_members(element) if name is not None or not dialect.named else None
    if members is None:
        return ObjectDropReason.NOT_AN_OBJECT
    values = dict(members)
    if dialect.named and (repeated or not _OBJECT_NAME.fullmatch(name or "")):
        return ObjectDropReason.UNEXPECTED_KEY
    if len(values) < len(members) or not values.keys() <= {dialect.label_key, dialect.box_key}:
        return ObjectDropReason.UNEXPECTED_KEY
    if dialect.box_key not in values:
        return ObjectDropReason.MISSING_BOX
    coordinates = values[dialect.box_key]
    if not isinstance(coordinates, list) or len(coordinates) != dialect.num_coordinates:
        return ObjectDropReason.WRONG_ARITY
    box = _read_box(coordinates)
    if box is None:
        return ObjectDropReason.INVALID_BOX
    label = values.get(dialect.label_key)
    text = label.strip() if isinstance(label, str) else ""
    return PredictedObject(text, box) if text else ObjectDropReason.MISSING_LABEL


def _places(answer: str, begin: int, end: int) -> tuple[Span, ...]:
    """Of an element that was read: two keys, each before its value, of which one is flat and in brackets."""
    _, one, _, other = _KEY_OR_VALUE.finditer(answer, begin, end)
    label, box = (one, other) if one.lastgroup else (other, one)
    coordinates = (found.span() for found in _COORDINATE.finditer(answer, *box.span()))
    return (label.span(label.lastgroup or 0), *coordinates)


def _read_box(coordinates: list[Any]) -> Coordinates | None:
    """Coordinates of one kind, in order and not negative, or None."""
    tokens = [_COORDINATE_TOKEN.fullmatch(each) for each in coordinates if isinstance(each, str)]
    if len(tokens) == len(coordinates):
        coordinates = [int(token[1]) if token else None for token in tokens]
    if any(type(each) is not int for each in coordinates):
        return None
    return tuple(coordinates) if is_in_order(coordinates) else None


def _read_members(element: str) -> tuple[tuple[str, Any], ...] | None:
    """The members of a JSON object in text order, repeated keys included; None for anything else.

    Objects are tuples and arrays are lists, within it as well.
    """
    if not element.startswith("{"):
        return None
    if "<|coord_" in element:
        element = _STRING_OR_TOKEN.sub(
            lambda found: found[0] if found[0][0] == '"' else f'"{found[0]}"', element
        )
    try:
        members: tuple[tuple[str, Any], ...] = _DECODER.decode(element)
    except (ValueError, RecursionError):
        return None
    return members


def _read_integer(lexeme: str) -> int | None:
    return int(lexeme) if len(lexeme) <= _MOST_DIGITS else None


_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_int=_read_integer)


def _end_of_element(text: str, position: int, closer: str) -> int | None:
    """The position where the element at ``position`` ends, or None if the text ends before it does.

    An element that opens a bracket ends after the bracket that balances it. Any other ends in front of
    the next comma or of the container's ``closer``. Inside, a closing bracket ends everything opened
    since its own opener; one that nothing opened is skipped.
    """
    bracketed = text.startswith(("{", "["), position)
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
