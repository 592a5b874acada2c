"""Conventions in which boxes are written, and answers read number by number, whatever their convention. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from swift_stage2.records import Box

Objects = tuple[tuple[str, Box], ...]
Size = tuple[float, float]
Array = NDArray[np.float64]

_FACTORS = (28, 32, 14, 16)
_LIMITS = [2.0 ** (step / 8) for step in range(11 * 8, 24 * 8)]
_SCALES = [2.0 ** (step / 16) for step in range(-48, 49) if step]

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
    CENTRE = "centre x, centre y, width, height"
    CORNER_SIZE = "x, y, width, height"


class Unit(StrEnum):
    """The thing that a number counts; a convention's ``value`` is put in."""

    EXPECTED = "the numbers that the template expects"
    SERVED = "pixels of the image as the server resizes it"
    STORED = "pixels of the stored image"
    THOUSANDTHS = "thousandths of the image (0..1000)"
    FRACTIONS = "fractions of the image (0..1)"
    RESIZED = "pixels of the image resized to multiples of {value:g}"
    LIMITED = "pixels of the image shrunk to about {value:.3g} pixels"
    SCALED = "{value:.3g} times the numbers that the template expects"


@dataclass(frozen=True, slots=True)
class Convention:
    """``value``: the factor of RESIZED, the pixels of LIMITED, the scale of SCALED."""

    side: Side = Side.ANSWERS
    layout: Layout = Layout.CORNERS
    unit: Unit = Unit.EXPECTED
    value: float = 0.0

    def __str__(self) -> str:
        unit = self.unit.value.format(value=self.value)
        return unit if self.layout is Layout.CORNERS else f"{self.layout} in {unit}"


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """How an image is resized: sides become multiples of ``factor``, the area stays within the limits."""

    factor: int
    min_pixels: int
    max_pixels: int


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


def resized(size: Size, limits: PixelLimits) -> Size:
    """Width and height as Qwen's processors resize an image."""
    factor, area = limits.factor, size[0] * size[1]
    sides = [max(1, round(side / factor)) * factor for side in size]
    if sides[0] * sides[1] > limits.max_pixels:
        shrink = (limits.max_pixels / area) ** 0.5
        sides = [max(1, int(side * shrink // factor)) * factor for side in size]
    elif sides[0] * sides[1] < limits.min_pixels:
        grow = (limits.min_pixels / area) ** 0.5
        sides = [int(-(-side * grow // factor)) * factor for side in size]
    return sides[0], sides[1]


def conventions(
    images: Sequence[AnsweredImage], limits: PixelLimits
) -> Iterator[tuple[Convention, list[Size]]]:
    """Each with the width and height of its numbers for every image; the expected one first, then by plausibility."""
    expected, stored = [image.expected for image in images], [image.stored for image in images]
    served = [image.served for image in images if image.served]
    plain: list[tuple[Unit, float, list[Size]]] = [
        (Unit.EXPECTED, 0.0, expected),
        *([(Unit.SERVED, 0.0, served)] if len(served) == len(images) else []),
        (Unit.STORED, 0.0, stored),
        (Unit.THOUSANDTHS, 0.0, [(1000.0, 1000.0)] * len(images)),
        (Unit.FRACTIONS, 0.0, [(1.0, 1.0)] * len(images)),
        (Unit.RESIZED, limits.factor, [image.resized for image in images]),
    ]
    for factor in _FACTORS:
        plain.append(
            (Unit.RESIZED, factor, [resized(size, replace(limits, factor=factor)) for size in stored])
        )
    distinct = [each for n, each in enumerate(plain) if all(each[2] != other[2] for other in plain[:n])]
    for side, layout, (unit, value, sizes) in product(Side, Layout, distinct):
        if (side, layout, sizes) != (Side.DATA, Layout.CORNERS, stored):  # which is as it should be
            yield Convention(side, layout, unit, value), sizes
    most = 2 * max(width * height for width, height in stored)
    for limit in (each for each in _LIMITS if each < most):
        own = PixelLimits(limits.factor, 1, int(limit))
        yield Convention(unit=Unit.LIMITED, value=limit), [resized(size, own) for size in stored]
    for scale in _SCALES:
        scaled = [(scale * width, scale * height) for width, height in expected]
        yield Convention(unit=Unit.SCALED, value=scale), scaled


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
    Layout.CENTRE: np.block([[_ONE, -_ONE / 2], [_ONE, _ONE / 2]]),
    Layout.CORNER_SIZE: np.block([[_ONE, _NONE], [_ONE, _ONE]]),
}
