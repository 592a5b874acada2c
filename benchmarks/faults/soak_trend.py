"""Turns a series of samples into its trend over the steps, and says whether it is flat. Pure.

The first fifth is warm-up and left out. The slope is Theil and Sen's: the median of the slopes between all pairs, which
a few disturbed samples do not move, with its 95 % interval. Called by the soak.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scipy.stats import theilslopes

_WARM_UP_SHARE = 0.2
_CONFIDENCE = 0.95
_FEWEST_VALUES = 10
NUM_STEPS = 2000
"""Drifts are told over as many steps."""
FEWEST_STEPS = 500
"""Less than this, behind the warm-up, proves nothing about ``NUM_STEPS``."""


class Verdict(StrEnum):
    """The whole interval of the drift lies at or below the tolerance, or above it; or neither, or the run is short."""

    FLAT = "flat"
    RISING = "rising"
    UNCLEAR = "not told apart"
    TOO_SHORT = "too short a run"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The most that may come on top in ``NUM_STEPS`` steps: this much, and this share of the median."""

    amount: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Drifts are in the series' own unit, over ``NUM_STEPS`` steps, with the ends of the 95 % interval."""

    num_values: int
    median: float
    drift: float
    low: float
    high: float
    tolerated: float
    verdict: Verdict


def trend(steps: Sequence[int], values: Sequence[float], tolerance: Tolerance) -> Trend | None:
    """The trend of ``values`` taken at ``steps``, which grow; None of too few values.

    The interval takes the values for independent. Memory is not, so that its true interval is wider; what is judged is
    the drift against a tolerance, not against 0.
    """
    if not steps:
        return None
    begin = steps[0] + _WARM_UP_SHARE * (steps[-1] - steps[0])
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if step >= begin]
    if len(kept) < _FEWEST_VALUES:
        return None
    x, y = zip(*kept, strict=True)
    slope, _, low_slope, high_slope = theilslopes(y, x, alpha=_CONFIDENCE)
    low, high = float(low_slope) * NUM_STEPS, float(high_slope) * NUM_STEPS
    median = statistics.median(y)
    tolerated = tolerance.amount + tolerance.share * abs(median)
    return Trend(
        num_values=len(kept),
        median=median,
        drift=float(slope) * NUM_STEPS,
        low=low,
        high=high,
        tolerated=tolerated,
        verdict=_verdict(x[-1] - x[0], low, high, tolerated),
    )


def _verdict(num_steps: int, low: float, high: float, tolerated: float) -> Verdict:
    if num_steps < FEWEST_STEPS:
        return Verdict.TOO_SHORT
    if low > tolerated:
        return Verdict.RISING
    return Verdict.FLAT if high <= tolerated else Verdict.UNCLEAR
