"""Scores predicted boxes against true ones: precision, recall and F1 over a whole set of images.

Pure. A prediction counts when it has the label of a true object and overlaps it enough, one to one, with
as many pairs as possible. Independent of channel B's matching, so that it can judge what that brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

Box = tuple[int, int, int, int]
Detections = Sequence[tuple[str, Box]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DetectionScore:
    """Micro-averaged over all objects of all images; a ratio of nothing to nothing is 0."""

    precision: float
    recall: float
    f1: float
    mean_iou: float  # over the pairs that count
    num_images: int


def score_detections(
    predictions: Sequence[Detections], ground_truth: Sequence[Detections], iou_threshold: float = 0.5
) -> DetectionScore:
    """Scores one list of (label, box) per image against another; boxes are x1, y1, x2, y2.

    Raises:
        ValueError: the two hold different numbers of images, or the threshold is outside (0, 1].
    """
    if len(predictions) != len(ground_truth):
        raise ValueError(
            "predictions and ground truth must speak of the same images, got "
            f"num_predictions={len(predictions)} num_ground_truth={len(ground_truth)}"
        )
    if not 0 < iou_threshold <= 1:
        raise ValueError(f"iou_threshold must lie in (0, 1], got iou_threshold={iou_threshold}")
    hits = [
        iou
        for predicted, true in zip(predictions, ground_truth, strict=True)
        for iou in _matched_ious(predicted, true, iou_threshold)
    ]
    num_predicted = sum(map(len, predictions))
    num_true = sum(map(len, ground_truth))
    return DetectionScore(
        precision=_ratio(len(hits), num_predicted),
        recall=_ratio(len(hits), num_true),
        f1=_ratio(2 * len(hits), num_predicted + num_true),
        mean_iou=_ratio(sum(hits), len(hits)),
        num_images=len(ground_truth),
    )


def _matched_ious(predicted: Detections, true: Detections, iou_threshold: float) -> list[float]:
    """IoU of each pair of the assignment with the most pairs and, among those, the largest overlap."""
    if not predicted or not true:
        return []
    iou = _pairwise_iou([box for _, box in predicted], [box for _, box in true])
    same_label = np.array([[p == t for t, _ in true] for p, _ in predicted])
    allowed = same_label & (iou >= iou_threshold)
    # Any allowed pair outweighs all the overlap that the others could add: at most one per object.
    gain = np.where(allowed, len(predicted) + len(true) + iou, 0.0)
    rows, columns = linear_sum_assignment(gain, maximize=True)
    return [float(iou[r, c]) for r, c in zip(rows, columns, strict=True) if allowed[r, c]]


def _pairwise_iou(first: Sequence[Box], second: Sequence[Box]) -> Floats:
    a, b = np.asarray(first, dtype=np.float64)[:, None], np.asarray(second, dtype=np.float64)[None]
    sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None)
    overlap = sides.prod(-1)
    union = _area(a) + _area(b) - overlap
    iou: Floats = np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)
    return iou


def _area(boxes: Floats) -> Floats:
    area: Floats = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return area


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
