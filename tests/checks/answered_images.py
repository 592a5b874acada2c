"""Draws images with true boxes, and the answers of a model that finds most of them, in any numbers.

The known convention is the oracle; nothing of the package's own conversions is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from swift_stage2.checks.coordinates import AnsweredImage
from swift_stage2.compat import declare_operators

declare_operators()  # before torchvision is imported

from qwen_vl_utils.vision_process import smart_resize  # noqa: E402

FACTOR, MIN_PIXELS, MAX_PIXELS = 28, 4 * 28 * 28, 1024 * 28 * 28  # how Qwen's processors resize an image
LABELS = ("car", "person", "dog", "sign")
Numbers = tuple[float, float, float, float]
Write = Callable[[Numbers, tuple[int, int]], Numbers]
"""A box in pixels of the stored image, and that image's size, to the numbers that are written."""


def stored(box: Numbers, size: tuple[int, int]) -> Numbers:
    return box


def share(full: float, digits: int = 0) -> Write:
    def write(box: Numbers, size: tuple[int, int]) -> Numbers:
        x1, y1, x2, y2 = (round(full * each / side, digits) for each, side in zip(box, size * 2, strict=True))
        return x1, y1, x2, y2

    return write


def resized(box: Numbers, size: tuple[int, int]) -> Numbers:
    x1, y1, x2, y2 = (
        round(each * new / old) for each, new, old in zip(box, resized_size(size) * 2, size * 2, strict=True)
    )
    return x1, y1, x2, y2


def resized_size(size: tuple[int, int]) -> tuple[int, int]:
    """By the library that resizes images for Qwen's models."""
    height, width = smart_resize(size[1], size[0], FACTOR, MIN_PIXELS, MAX_PIXELS)
    return width, height


def y_first(write: Write) -> Write:
    def swapped(box: Numbers, size: tuple[int, int]) -> Numbers:
        x1, y1, x2, y2 = write(box, size)
        return y1, x1, y2, x2

    return swapped


def corner_size(write: Write) -> Write:
    def sized(box: Numbers, size: tuple[int, int]) -> Numbers:
        x1, y1, x2, y2 = write(box, size)
        return x1, y1, x2 - x1, y2 - y1

    return sized


def draw(
    seed: int,
    *,
    answers: Write,
    thousandths: bool = False,
    num_images: int = 32,
    noise: float = 0.04,
    finds: bool = True,
    sides: tuple[int, int] = (300, 2400),
) -> list[AnsweredImage]:
    """``noise``: of an edge, in shares of the object's side. ``finds``: else the answers are boxes from anywhere.

    One object in eight is missed, one in ten answered twice, one label in twenty is wrong, and two answers in five end
    in an object that is not there. The template expects thousandths, or pixels of the resized image.
    """
    random = np.random.default_rng(seed)
    images = []
    for _ in range(num_images):
        size = (int(random.integers(*sides)), int(random.integers(*sides)))
        truth = [(str(random.choice(LABELS)), _box(random, size)) for _ in range(random.integers(1, 9))]
        told = truth if finds else [(label, _box(random, size)) for label, _ in truth]
        seen = [each for each in told if random.random() > 1 / 8]
        seen += [each for each in seen if random.random() < 0.1]
        written = [
            (
                label if random.random() < 0.95 else str(random.choice(LABELS)),
                _shaken(random, box, size, noise),
            )
            for label, box in seen
        ]
        if random.random() < 0.4:
            written.append((str(random.choice(LABELS)), _box(random, size)))
        order = random.permutation(len(written))
        images.append(
            AnsweredImage(
                tuple((written[number][0], answers(written[number][1], size)) for number in order),
                tuple((label, box) for label, box in truth),
                size,
                (1000, 1000) if thousandths else resized_size(size),
                resized_size(size),
            )
        )
    return images


def _box(random: np.random.Generator, size: tuple[int, int]) -> Numbers:
    width, height = (side * (0.05 + 0.35 * random.random()) for side in size)
    x, y = ((side - length) * random.random() for side, length in zip(size, (width, height), strict=True))
    return round(x), round(y), round(x + width), round(y + height)


def _shaken(random: np.random.Generator, box: Numbers, size: tuple[int, int], noise: float) -> Numbers:
    x1, y1, x2, y2 = box
    width, height = noise * (x2 - x1), noise * (y2 - y1)
    left, right = np.clip(random.normal((x1, x2), width), 0, size[0])
    top, bottom = np.clip(random.normal((y1, y2), height), 0, size[1])
    return min(left, right), min(top, bottom), max(left, right), max(top, bottom)
