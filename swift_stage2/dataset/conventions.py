"""Conventions in which boxes are written, and answers read number by number, whatever their convention. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from swift_stage2.records import Box

Objects = tuple[tuple[str, Box], ...]
Size = tuple[float, float]
Array = NDArray[np.float64]

_NUMBER = r'\s{0,9}"?(-?\d{1,9}(?:\.\d{0,18})?(?:e-?\d{1,2})?)"?\s{0,9}'
_FOUR = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:,|\),\s?\(){_NUMBER},{_NUMBER}[\])]", re.IGNORECASE)
_TOKEN = re.compile(r"<\|coord_(\d{1,9})\|>")
_ELEMENT = re.compile(r"\{[^{}]*\}")


class Side(StrEnum):
    """Whose numbers are in a convention."""

    ANSWERS = "answers"
    DATA = "data"


class Layout(StrEnum):
    """The meaning of a box's four numbers."""

    CORNERS = "x1, y1, x2, y2"
    Y_FIRST = "y1, x1, y2, x2"
    CORNER_SIZE = "x, y, width, height"


class Unit(StrEnum):
    """The thing that a number counts."""

    EXPECTED = "the numbers that the template expects"
    SERVED = "pixels of the image as the server resizes it"
    STORED = "pixels of the stored image"
    THOUSANDTHS = "thousandths of the image (0..1000)"
    FRACTIONS = "fractions of the image (0..1)"
    RESIZED = "pixels of the image as the learner resizes it"


@dataclass(frozen=True, slots=True)
class Convention:
    """Whose numbers are written how."""

    side: Side = Side.ANSWERS
    layout: Layout = Layout.CORNERS
    unit: Unit = Unit.EXPECTED

    def __str__(self) -> str:
        return self.unit if self.layout is Layout.CORNERS else f"{self.layout} in {self.unit}"


@dataclass(frozen=True, slots=True)
class AnsweredImage:
    """One image: what the model wrote, number by number, and its truth as the data has it; sizes are width, height."""

    answers: Objects
    truth: Objects
    stored: Size
    expected: Size
    """Of the space in which the template writes boxes."""
    resized: Size
    """Of the image as the learner's model sees it."""
    served: Size | None = None
    """Of the image as the server says that its model saw it."""


def read_numbers(text: str, label_key: str = "label") -> Objects:
    """Every box of an answer as it is written: fractions, numbers in any order, in any brackets. No text raises."""
    text = _TOKEN.sub(r"\1", text)
    label = re.compile(rf'"{re.escape(label_key)}"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')
    found = []
    for element in _ELEMENT.findall(text) or [text]:
        named = label.search(element)
        for box in _FOUR.findall(element):
            x1, y1, x2, y2 = map(float, box)
            found.append((_unescaped(named[1]) if named else "", (x1, y1, x2, y2)))
    return tuple(found)


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(text)).strip()
    except ValueError:
        return text[1:-1].strip()


def conventions(images: Sequence[AnsweredImage]) -> Iterator[tuple[Convention, list[Size]]]:
    """Each with the width and height of its numbers for every image; the expected one first, then by plausibility."""
    stored = [image.stored for image in images]
    served = [image.served for image in images if image.served]
    units: list[tuple[Unit, list[Size]]] = [
        (Unit.EXPECTED, [image.expected for image in images]),
        *([(Unit.SERVED, served)] if len(served) == len(images) else []),
        (Unit.STORED, stored),
        (Unit.THOUSANDTHS, [(1000.0, 1000.0)] * len(images)),
        (Unit.FRACTIONS, [(1.0, 1.0)] * len(images)),
        (Unit.RESIZED, [image.resized for image in images]),
    ]
    distinct = [each for n, each in enumerate(units) if all(each[1] != other[1] for other in units[:n])]
    for side, layout, (unit, sizes) in product(Side, Layout, distinct):
        if (side, layout, sizes) != (Side.DATA, Layout.CORNERS, stored):  # which is as it should be
            yield Convention(side, layout, unit), sizes


def four(sizes: Size | Array) -> Array:
    """Width and height for each of a box's corners."""
    sides = np.asarray(sizes, dtype=np.float64)
    return np.concatenate([sides, sides], axis=-1)


def in_order(boxes: Array) -> Array:
    """With the smaller number of each axis first."""
    first, second = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=-1)


def to_corners(numbers: Array, layout: Layout) -> Array:
    """Boxes as x1, y1, x2, y2."""
    corners: Array = numbers @ _CORNERS_OF[layout].T
    return corners


def from_corners(boxes: Array, layout: Layout) -> Array:
    """Boxes as the layout has them."""
    numbers: Array = boxes @ np.linalg.inv(_CORNERS_OF[layout]).T
    return numbers


_ONE, _NONE = np.eye(2), np.zeros((2, 2))
# x1, y1, x2, y2 as sums of a layout's four numbers.
_CORNERS_OF: Mapping[Layout, Array] = {
    Layout.CORNERS: np.eye(4),
    Layout.Y_FIRST: np.eye(4)[[1, 0, 3, 2]],
    Layout.CORNER_SIZE: np.block([[_ONE, _NONE], [_ONE, _ONE]]),
}
