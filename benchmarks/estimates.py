"""Turns repeated measurements into medians, ratios and drifts, each with its spread or interval. Pure.

Bootstraps are percentile ones (Efron and Tibshirani 1993). Of paired runs pairs are resampled and, within a pair,
steps, because runs differ more than the steps of one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import theilslopes, ttest_1samp

Floats = npt.NDArray[np.float64]
NUM_RESAMPLES = 2000
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


def pair_ratios(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, bare, strict=True)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """An estimate and the ends of its interval."""

    value: float
    low: float
    high: float

    def words(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Of two independent samples, neither empty, with its 95 % interval."""
    rng = np.random.default_rng(0)
    tail = 50 * (1 - _CONFIDENCE)
    above, below = (
        np.median(rng.choice(values, (NUM_RESAMPLES, len(values))), axis=1)
        for values in (numerator, denominator)
    )
    low, high = np.percentile(above / below, (tail, 100 - tail))
    return Ratio(statistics.median(numerator) / statistics.median(denominator), float(low), float(high))


def paired_ratio(plain: Sequence[Floats], ours: Sequence[Floats], seed: int = 0) -> Ratio:
    """The median ratio of single steps; it lies below ``high`` in 95 % of all resamples, and as often above ``low``.

    ``plain[p][i]`` and ``ours[p][i]`` are seconds of step i in pair p; pairs are cut to the shorter arm.
    Raises ValueError: there is no pair, or an arm is missing.
    """
    if len(plain) == 0 or len(plain) != len(ours):
        raise ValueError(f"every pair needs both arms, got {len(plain)} plain and {len(ours)} ours")
    num_steps = min(len(steps) for steps in (*plain, *ours))
    ratios = np.stack([own[:num_steps] / other[:num_steps] for own, other in zip(ours, plain, strict=True)])
    rng = np.random.default_rng(seed)
    medians = []
    for _ in range(NUM_RESAMPLES):
        pairs = rng.integers(0, len(ratios), len(ratios))[:, None]
        steps = rng.integers(0, num_steps, ratios.shape)
        medians.append(np.median(ratios[pairs, steps]))
    low, high = np.percentile(medians, (100 * (1 - _CONFIDENCE), 100 * _CONFIDENCE))
    return Ratio(float(np.median(ratios)), float(low), float(high))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A series' drift over ``NUM_STEPS`` steps, in its own unit, with the ends of its 95 % interval."""

    median: float
    drift: float
    low: float
    high: float
    tolerated: float
    num_steps: int

    @property
    def verdict(self) -> str:
        """Says whether the whole interval lies at or below what is tolerated, or above it."""
        if self.num_steps < FEWEST_STEPS:
            return "too short a run"
        if self.low > self.tolerated:
            return "rising"
        return "flat" if self.high <= self.tolerated else "not told apart"


def trend(
    steps: Sequence[int], values: Sequence[float], *, amount: float = 0.0, share: float = 0.0
) -> Trend | None:
    """The trend of ``values`` taken at ``steps``, which grow, behind their first fifth; None of too few values.

    ``amount``, and this ``share`` of the median, may come on top in ``NUM_STEPS`` steps. The slope is Theil and Sen's,
    the median of the slopes between all pairs, which a few disturbed samples do not move. Its interval takes the
    values for independent. Memory is not, so that its true interval is wider; what is judged is the drift against a
    tolerance, not against 0.
    """
    begin = steps[0] + _WARM_UP_SHARE * (steps[-1] - steps[0]) if steps else 0
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if step >= begin]
    if len(kept) < _FEWEST_VALUES:
        return None
    x, y = zip(*kept, strict=True)
    slope, _, low, high = theilslopes(y, x, alpha=_CONFIDENCE)
    median = statistics.median(y)
    return Trend(
        median=median,
        drift=float(slope) * NUM_STEPS,
        low=float(low) * NUM_STEPS,
        high=float(high) * NUM_STEPS,
        tolerated=amount + share * abs(median),
        num_steps=x[-1] - x[0],
    )
