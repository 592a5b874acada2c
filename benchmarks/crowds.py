"""Scenes with a wanted number of objects, and answers to them as a model that is half right gives them. Seeded.

Boxes are integers within ``IMAGE_SIDE``, which the tiny model's template does not resize, so that ground truth and
answers share one space.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from swift_stage2.demo.scenes import COLOURS, SHAPES, Box

IMAGE_SIDE = 448
_LEAST_SIDE, _MOST_SIDE = 16, 64
_JITTER = 6
_SMALL_JITTER = 3
_SHARE_MISSED = 0.1
_NUM_REPEATED = 10

Objects = list[tuple[str, Box]]


class AnswerKind(StrEnum):
    """The predicted boxes relate to the true ones in one of these ways."""

    JITTERED = "jittered"  # Most truths, in another order, a few pixels off; some missed, as many invented
    REPEATED = "repeated"
    """The same few boxes over and over, as a model writes that does not come to its end: everything ties."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Ground truth and an answer to it, with as many objects each."""

    truth: Objects
    answer: Objects


def make_crowd(num_objects: int, kind: AnswerKind, seed: int) -> Crowd:
    rng = random.Random(f"{num_objects} {kind} {seed}")
    truth = [_random_object(rng) for _ in range(num_objects)]
    match kind:
        case AnswerKind.JITTERED:
            answer = [
                _random_object(rng) if rng.random() < _SHARE_MISSED else (label, _shaken(rng, box))
                for label, box in rng.sample(truth, len(truth))
            ]
        case AnswerKind.REPEATED:
            answer = [truth[index % min(_NUM_REPEATED, num_objects)] for index in range(num_objects)]
    return Crowd(truth, answer)


def half_right_answer(truth: Objects, side: int, seed: int) -> Objects:
    """An answer to a scene of ``side`` pixels: its objects in another order, a little off, some missed."""
    rng = random.Random(seed)
    found = [
        (label, _shaken(rng, box, _SMALL_JITTER, side))
        for label, box in rng.sample(truth, len(truth))
        if rng.random() >= _SHARE_MISSED
    ]
    return found or truth[:1]


def _random_object(rng: random.Random) -> tuple[str, Box]:
    width, height = rng.randint(_LEAST_SIDE, _MOST_SIDE), rng.randint(_LEAST_SIDE, _MOST_SIDE)
    x, y = rng.randint(0, IMAGE_SIDE - width), rng.randint(0, IMAGE_SIDE - height)
    return f"{rng.choice(list(COLOURS))} {rng.choice(SHAPES)}", (x, y, x + width, y + height)


def _shaken(rng: random.Random, box: Box, jitter: int = _JITTER, side: int = IMAGE_SIDE) -> Box:
    x1, y1, x2, y2 = (min(side, max(0, edge + rng.randint(-jitter, jitter))) for edge in box)
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
