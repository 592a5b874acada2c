"""All boxes of one side, the true or the predicted ones, as arrays in the order of the images. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.detections.prediction import Prediction

_SMALL, _MEDIUM = 32.0**2, 96.0**2  # square pixels, as COCO has them


class ScoreConvention(StrEnum):
    """The score of an object whose model gives none."""

    ONE = "one"
    """All 1: ties, which COCO's arithmetic takes in the order of the data."""
    ORDER = "order"
    """By its place in its answer: the first objects of all answers, then the second ones, …"""


@dataclass(frozen=True, slots=True)
class ObjectArrays:
    """One entry per object."""

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Numbers of classes."""
    boxes: NDArray[np.float64]
    """Shape (num_objects, 4): x1, y1, x2, y2 in pixels."""
    scores: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """COCO's class of each box's area: 0 small, 1 medium, 2 large."""
        areas = np.prod(self.boxes[:, 2:] - self.boxes[:, :2], axis=1)
        sizes: NDArray[np.int64] = np.searchsorted([_SMALL, _MEDIUM], areas, side="right")
        return sizes


@dataclass(frozen=True, slots=True)
class DetectionData:
    """Truth and predictions of the same images. ``classes`` are all labels that either names."""

    num_images: int
    classes: tuple[str, ...]
    truth: ObjectArrays
    predicted: ObjectArrays


def detection_data(
    truths: Sequence[TrueObjects],
    predictions: Sequence[Prediction | None],
    convention: ScoreConvention,
    classes: Sequence[str] = (),
) -> DetectionData:
    """Truth and prediction of each row; one without a prediction has predicted nothing. ``classes``: further labels."""
    labels = {label for truth in truths for label in truth.labels} | set(classes)
    labels |= {label.strip() for each in predictions if each for label in each.objects.ref}
    numbers = {label: number for number, label in enumerate(sorted(labels))}
    scores = [list(_scores(each, convention)) if each else [] for each in predictions]
    return DetectionData(
        len(truths),
        tuple(numbers),
        _arrays(
            [[numbers[label] for label in truth.labels] for truth in truths],
            [truth.boxes for truth in truths],
            [[1.0] * len(truth) for truth in truths],
        ),
        _arrays(
            [[numbers[label.strip()] for label in each.objects.ref] if each else [] for each in predictions],
            [each.objects.bbox if each else () for each in predictions],
            scores,
        ),
    )


def _scores(prediction: Prediction, convention: ScoreConvention) -> Sequence[float]:
    num_objects = len(prediction.objects.ref)
    if prediction.scores is not None:
        return prediction.scores
    if convention is ScoreConvention.ONE:
        return [1.0] * num_objects
    return [1 / place for place in range(1, num_objects + 1)]


def _arrays(
    labels: Sequence[Sequence[int]],
    boxes: Sequence[Sequence[Sequence[float]]],
    scores: Sequence[Sequence[float]],
) -> ObjectArrays:
    return ObjectArrays(
        np.repeat(np.arange(len(boxes)), [len(each) for each in boxes]),
        np.array([label for each in labels for label in each], dtype=np.int64),
        np.array([box for each in boxes for box in each], dtype=np.float64).reshape(-1, 4),
        np.array([score for each in scores for score in each], dtype=np.float64),
    )
