"""One row's answer: its boxes in pixels of the stored image, as a line of a file of predictions holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

from swift_stage2.channel_b.dialects import Dialect
from swift_stage2.channel_b.matching import MAX_COORDINATE
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.records import Box, ObjectDropReason

FAILED = "failed"
"""``finish_reason`` of a row that brought no answer."""
TRUNCATED = "length"
_DECIMALS = 2
_Side = Annotated[int, Field(ge=1)]
_Coordinate = Annotated[FiniteFloat, Field(ge=-MAX_COORDINATE, le=MAX_COORDINATE)]
_PixelBox = tuple[_Coordinate, _Coordinate, _Coordinate, _Coordinate]


@dataclass(frozen=True, slots=True)
class LabelledBoxes:
    """Labels and boxes (x1, y1, x2, y2), one of each per object."""

    ref: tuple[str, ...] = ()
    bbox: tuple[_PixelBox, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of the file."""

    image: str
    width: _Side
    height: _Side
    objects: LabelledBoxes
    scores: tuple[FiniteFloat, ...] | None = None
    answer: str | None = None
    finish_reason: str | None = None

    def fault(self) -> str:
        """The first rule that it breaks, or nothing."""
        num_boxes = len(self.objects.bbox)
        num_scores = num_boxes if self.scores is None else len(self.scores)
        if not len(self.objects.ref) == num_boxes == num_scores:
            return "every object needs one ref, one bbox and, where there are scores, one score"
        bad = next((box for box in self.objects.bbox if box[0] > box[2] or box[1] > box[3]), None)
        return f"a box must have x1 <= x2 and y1 <= y2, got bbox={list(bad)}" if bad else ""


def in_pixels(
    objects: Sequence[tuple[str, Sequence[float]]], space: tuple[int, int], size: tuple[int, int]
) -> LabelledBoxes:
    """Labels and boxes of a template's ``space`` (width, height) in an image of ``size``."""
    x, y, cut = size[0] / space[0], size[1] / space[1], partial(round, ndigits=_DECIMALS)
    boxes: list[Box] = [
        (cut(x1 * x), cut(y1 * y), cut(x2 * x), cut(y2 * y)) for _, (x1, y1, x2, y2) in objects
    ]
    return LabelledBoxes(tuple(as_text(label) for label, _ in objects), tuple(boxes))


def answer_flags(predictions: Sequence[Prediction | None], dialect: Dialect) -> dict[str, NDArray[np.int64]]:
    """Per answer 0 or 1, by the name of the metric: cut off, not wholly readable though it ended, or not there."""
    ends = [prediction.finish_reason if prediction else FAILED for prediction in predictions]
    flags = {
        "truncated_ratio": [end == TRUNCATED for end in ends],
        "failed_ratio": [end == FAILED for end in ends],
    }
    if any(each and each.answer is not None for each in predictions):
        flags["invalid_ratio"] = [
            bool(each and each.answer is not None and end != TRUNCATED and _is_invalid(each.answer, dialect))
            for each, end in zip(predictions, ends, strict=True)
        ]
    return {name: np.array(values, dtype=np.int64) for name, values in flags.items()}


def dropped_objects(predictions: Sequence[Prediction | None], dialect: Dialect) -> dict[str, int] | None:
    """How many objects of the answers the parser drops, by reason; None where nobody kept the texts."""
    answers = [each.answer for each in predictions if each and each.answer is not None]
    found: Counter[ObjectDropReason] = Counter()
    for answer in answers:
        found.update(parse_rollout(answer, dialect).dropped)
    return {str(reason): found[reason] for reason in ObjectDropReason if found[reason]} if answers else None


def _is_invalid(answer: str, dialect: Dialect) -> bool:
    parsed = parse_rollout(answer, dialect)
    return bool(parsed.dropped) or not parsed.is_whole


def as_text(label: str) -> str:
    """``label`` without halves of surrogate pairs, which a model may write and no file can hold."""
    return label.encode("utf-8", "replace").decode("utf-8")
