"""Calibration of scores: whether of the objects with a score of about p a share of about p is right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NUM_BINS = 10


class ScoreBin(NamedTuple):
    """Objects with ``low <= score < high``; the last bin has those of 1, too."""

    low: float
    high: float
    objects: int
    confidence: float
    """Their mean score."""
    matched: float
    """The share that is right."""


def score_bins(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> list[ScoreBin]:
    """Bins of one width that hold objects; none at all if a score is no probability."""
    if not ((scores >= 0) & (scores <= 1)).all():
        return []
    places = np.minimum((scores * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    bins = []
    for place in np.unique(places).tolist():
        own = places == place
        bounds = place / _NUM_BINS, (place + 1) / _NUM_BINS
        bins.append(ScoreBin(*bounds, int(own.sum()), float(scores[own].mean()), float(right[own].mean())))
    return bins


def calibration_error(bins: Sequence[ScoreBin]) -> float:
    """ECE: how far confidence and the share that is right are apart, mean over objects. ``bins`` hold some."""
    gaps = sum(each.objects * abs(each.confidence - each.matched) for each in bins)
    return gaps / sum(each.objects for each in bins)
