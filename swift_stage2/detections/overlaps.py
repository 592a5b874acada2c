"""Pairs of boxes of one image and one class that overlap, and which of them are matched at each IoU threshold.

One to one: the assignment of training (``channel_b.matching`` with ``same_label`` and its default costs), for all
images at once. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_stage2.channel_b.assignment import Candidates, assign
from swift_stage2.channel_b.matching import paired_ious
from swift_stage2.config import MatchingConfig
from swift_stage2.detections.objects import DetectionData, ObjectArrays

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's: 0.5, 0.55, … 0.95."""
_COSTS = MatchingConfig()


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Pairs with an IoU of at least the lowest threshold, sorted by prediction, then truth."""

    predicted: NDArray[np.int64]
    true: NDArray[np.int64]
    ious: NDArray[np.float64]
    images: NDArray[np.int64]


def find_overlaps(data: DetectionData) -> Overlaps:
    """All of them; memory grows with the pairs of one image and class."""
    predicted, true = data.predicted, data.truth
    keys = [_keys(data, side) for side in (predicted, true)]
    order = np.argsort(keys[1], kind="stable")
    begins, ends = (np.searchsorted(keys[1][order], keys[0], side) for side in ("left", "right"))
    counts = ends - begins
    left = np.repeat(np.arange(len(predicted)), counts)
    right = order[np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[left]]
    ious = paired_ious(predicted.boxes[left], true.boxes[right])
    kept = ious >= THRESHOLDS[0]
    left, right, ious = left[kept], right[kept], ious[kept]
    return Overlaps(left, right, ious, predicted.images[left])


def match_one_to_one(overlaps: Overlaps) -> list[NDArray[np.int64]]:
    """Per threshold the places of the pairs that are matched, in order."""
    gains = _COSTS.unmatched_prediction_cost + _COSTS.unmatched_ground_truth_cost - (1 - overlaps.ious)
    known: dict[bytes, NDArray[np.int64]] = {}  # thresholds often leave an image the same pairs
    return [_assign(overlaps, gains, np.flatnonzero(overlaps.ious >= each), known) for each in THRESHOLDS]


def _assign(
    overlaps: Overlaps,
    gains: NDArray[np.float64],
    places: NDArray[np.int64],
    known: dict[bytes, NDArray[np.int64]],
) -> NDArray[np.int64]:
    rows, columns = overlaps.predicted[places], overlaps.true[places]
    alone = (np.bincount(rows)[rows] == 1) & (np.bincount(columns)[columns] == 1)
    contested = places[~alone]
    found = [places[alone]]
    borders = np.flatnonzero(np.diff(overlaps.images[contested])) + 1
    for group in np.split(contested, borders) if len(contested) else ():
        key = group.tobytes()
        if key not in known:
            rows, columns = overlaps.predicted[group], overlaps.true[group]
            candidates = Candidates(rows - rows.min(), columns - columns.min(), gains[group])
            pairs = set(assign(candidates))
            both = zip(candidates.rows.tolist(), candidates.columns.tolist(), strict=True)
            known[key] = group[[pair in pairs for pair in both]]
        found.append(known[key])
    return np.sort(np.concatenate(found))


def _keys(data: DetectionData, side: ObjectArrays) -> NDArray[np.int64]:
    """A number per object that those of one image and class share; ascending with the image."""
    return side.images * max(1, len(data.classes)) + side.labels
