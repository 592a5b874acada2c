"""All boxes of one side, the true or the predicted ones, as arrays in the order of the images. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.detections.prediction import Prediction

_SMALL, _MEDIUM = 32.0**2, 96.0**2  # square pixels, as COCO has them


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


def detection_data(truths: Sequence[TrueObjects], predictions: Sequence[Prediction | None]) -> DetectionData:
    """Truth and prediction of each row; one without a prediction has predicted nothing. Without scores all are 1."""
    found = [
        (each.objects.ref, each.objects.bbox, each.scores) if each else ((), (), ()) for each in predictions
    ]
    said = [[label.strip() for label in labels] for labels, _, _ in found]
    classes = tuple(
        sorted({label for labels in (*said, *(each.labels for each in truths)) for label in labels})
    )
    numbers = {label: number for number, label in enumerate(classes)}

    def arrays(
        labels: Sequence[Sequence[str]],
        boxes: Sequence[Sequence[Sequence[float]]],
        scores: Sequence[Sequence[float]],
    ) -> ObjectArrays:
        return ObjectArrays(
            np.repeat(np.arange(len(boxes)), [len(each) for each in boxes]),
            np.array([numbers[label] for each in labels for label in each], dtype=np.int64),
            np.array([box for each in boxes for box in each], dtype=np.float64).reshape(-1, 4),
            np.array([score for each in scores for score in each], dtype=np.float64),
        )

    given = [[1.0] * len(boxes) if scores is None else scores for _, boxes, scores in found]
    truth = arrays(
        [each.labels for each in truths],
        [each.boxes for each in truths],
        [[1.0] * len(each) for each in truths],
    )
    return DetectionData(len(truths), classes, truth, arrays(said, [boxes for _, boxes, _ in found], given))
