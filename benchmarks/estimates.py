"""Turns repeated measurements into medians, ratios and drifts, each with its spread or interval. Pure.

Bootstraps are percentile ones (Efron and Tibshirani 1993). Of paired runs pairs are resampled and, within a pair,
steps, because runs differ more than the steps of one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy.stats import theilslopes, ttest_1samp

Floats = npt.NDArray[np.float64]
NUM_RESAMPLES = 2000
_UPPER_PERCENTILE = 95.0
_CONFIDENCE = 0.95
_WARM_UP_SHARE = 0.2
_FEWEST_VALUES = 10
_FEWEST_GAINS = 3
NUM_STEPS = 2000
"""Drifts are told over as many steps."""
FEWEST_STEPS = 500
"""Less than this, behind the warm-up, proves nothing about ``NUM_STEPS``."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of one quantity."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | Floats) -> Spread:
        """Raises ValueError when there is none."""
        if len(values) == 0:
            raise ValueError("a spread needs at least one value, got none; measure once")
        low, median, high = np.percentile(values, (25, 50, 75))
        return cls(float(low), float(median), float(high))

    def words(self, digits: int, scale: float = 1.0) -> str:
        """``median (low..high)``, each times ``scale``."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} ({low}..{high})"


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent e of ``cost = c · size^e``, by least squares of the logarithms.

    Raises ValueError: fewer than two different sizes, or something that is not above 0.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(costs) or min(*sizes, *costs) <= 0:
        raise ValueError(
            f"an exponent needs costs above 0 at two different sizes, got sizes={list(sizes)} costs={list(costs)}"
        )
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def exponent_words(sizes: Sequence[float], costs: Sequence[float], otherwise: str) -> str:
    """``fit_exponent`` for a table, or ``otherwise`` where there is one size only."""
    return f"{fit_exponent(sizes, costs):.2f}" if len(set(sizes)) > 1 else otherwise


def verdict(holds: bool) -> str:
    """A table says this beside a budget."""
    return "held" if holds else "missed"


def mean_and_range(values: Sequence[float], form: str) -> str:
    """``mean (lowest..highest)``, the mean alone where all are equal, empty of none; ``form`` is of one number."""
    if not values:
        return ""
    mean = format(statistics.fmean(values), form)
    return mean if min(values) == max(values) else f"{mean} ({min(values):{form}}..{max(values):{form}})"


def gain_words(gains: Sequence[float], form: str) -> str:
    """``mean_and_range`` of paired differences; from three on also Student's 95 % interval of their mean."""
    words = mean_and_range(gains, form)
    if len(gains) < _FEWEST_GAINS or min(gains) == max(gains):
        return words
    low, high = ttest_1samp(gains, 0.0).confidence_interval(_CONFIDENCE)
    return f"{words}, 95 %: {low:{form}}..{high:{form}}"


# --- paired runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounded:
    """An estimate, and the value it stays under in 95 % of all resamples."""

    value: float
    upper_95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Arm ``ours`` relative to arm ``plain``."""

    median: Bounded
    """Median of the ratios of single steps: blind to rare slow steps, and to noise."""
    total: Bounded
    """Ratio of the summed times: everything counts, also other programs on the machine."""
    quartiles: tuple[float, float]
    """Of the ratios of single steps."""
    num_pairs: int
    num_steps: int
    """Compared steps per pair."""


def step_seconds(end_ns: Sequence[int], num_warmup: int) -> Floats:
    """Durations from the end of a step to the end of the next, without the first ``num_warmup`` of them.

    Raises ValueError: nothing is left.
    """
    seconds: Floats = np.diff(np.asarray(end_ns, dtype=np.float64))[num_warmup:] / 1e9
    if len(seconds) == 0:
        raise ValueError(
            f"steps are needed after the warm-up, got {len(end_ns)} steps and num_warmup={num_warmup}"
        )
    return seconds


def num_common(ends_ns: Sequence[Sequence[int]]) -> int:
    """How many steps each of these runs, which ran at the same time, ended before the first of them was through."""
    first_end = min(ends[-1] for ends in ends_ns)
    return min(sum(end <= first_end for end in ends) for ends in ends_ns)


def compare(plain: Sequence[Floats], ours: Sequence[Floats], seed: int = 0) -> PairedRatio:
    """``plain[p][i]`` and ``ours[p][i]`` are seconds of step i in pair p; pairs are cut to the shorter arm.

    Raises ValueError: there is no pair, or an arm is missing.
    """
    if len(plain) == 0 or len(plain) != len(ours):
        raise ValueError(f"every pair needs both arms, got {len(plain)} plain and {len(ours)} ours")
    num_steps = min(len(steps) for steps in (*plain, *ours))
    slow = np.stack([steps[:num_steps] for steps in ours])
    base = np.stack([steps[:num_steps] for steps in plain])
    rng = np.random.default_rng(seed)
    medians, totals = [], []
    for _ in range(NUM_RESAMPLES):
        pairs = rng.integers(0, len(base), len(base))[:, None]
        steps = rng.integers(0, num_steps, (len(base), num_steps))
        medians.append(np.median(slow[pairs, steps] / base[pairs, steps]))
        totals.append(slow[pairs, steps].sum() / base[pairs, steps].sum())
    ratios = slow / base
    low, high = np.percentile(ratios, (25, 75))
    return PairedRatio(
        median=Bounded(float(np.median(ratios)), float(np.percentile(medians, _UPPER_PERCENTILE))),
        total=Bounded(float(slow.sum() / base.sum()), float(np.percentile(totals, _UPPER_PERCENTILE))),
        quartiles=(float(low), float(high)),
        num_pairs=len(base),
        num_steps=num_steps,
    )


def pair_ratios(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, bare, strict=True)]


# --- independent samples ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two medians, with its 95 % interval."""

    value: float
    low: float
    high: float

    def words(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Of two independent samples, neither empty."""
    rng = np.random.default_rng(0)
    tail = 50 * (1 - _CONFIDENCE)
    above, below = (
        np.median(rng.choice(values, (NUM_RESAMPLES, len(values))), axis=1)
        for values in (numerator, denominator)
    )
    low, high = np.percentile(above / below, (tail, 100 - tail))
    return Ratio(statistics.median(numerator) / statistics.median(denominator), float(low), float(high))


# --- trends -----------------------------------------------------------------------------------------


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
    """The trend of ``values`` taken at ``steps``, which grow, behind their first fifth; None of too few values.

    The slope is Theil and Sen's, the median of the slopes between all pairs, which a few disturbed samples do not move.
    Its interval takes the values for independent. Memory is not, so that its true interval is wider; what is judged is
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
    if x[-1] - x[0] < FEWEST_STEPS:
        found = Verdict.TOO_SHORT
    elif low > tolerated:
        found = Verdict.RISING
    else:
        found = Verdict.FLAT if high <= tolerated else Verdict.UNCLEAR
    return Trend(
        num_values=len(kept),
        median=median,
        drift=float(slope) * NUM_STEPS,
        low=low,
        high=high,
        tolerated=tolerated,
        verdict=found,
    )
