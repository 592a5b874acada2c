"""Compares channel-A steps before, during and after an outage of the servers. Pure; called by ``bench outage``.

Only steps without a sync round in them count: rounds have a column of their own elsewhere, and there is none while
no server answers. The intervals are percentile bootstraps of a ratio of two independent samples (Efron and Tibshirani
1993). Steps of one phase are not quite independent of each other, so that the intervals are somewhat too narrow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from benchmarks.faults.accounting import Gap

_CONFIDENCE = 0.95
_NUM_RESAMPLES = 2000
_FEWEST_STEPS = 2


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run by the audit's clock, Unix seconds: steps that begin and end inside it belong to it."""

    start: float
    end: float

    def a_seconds(self, gaps: Sequence[Gap]) -> list[float]:
        """Seconds of its channel-A steps without a round."""
        return [
            gap.seconds
            for gap in gaps
            if gap.channel == "A"
            and gap.syncing_s == 0
            and self.start <= gap.start
            and gap.start + gap.seconds <= self.end
        ]

    def b_steps(self, gaps: Sequence[Gap]) -> int:
        """How many of its steps trained channel B."""
        return sum(gap.channel == "B" and self.start <= gap.start < self.end for gap in gaps)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two medians, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageReport:
    """One outage."""

    num_before: int
    num_during: int
    num_after: int
    median_before_s: float
    during: Ratio
    """Median A-step while no server answers, over the one before."""
    after: Ratio
    """Median A-step once B runs again, over the one before."""
    during_to_both: Ratio
    """Over the one before and after together: a machine that drifts slowly drops out."""
    longest_wait_s: float
    """Of the main thread in one step of the outage, rounds apart, beyond the median before."""
    b_steps: tuple[int, int, int]
    """Before, during, after."""


def compare_phases(gaps: Sequence[Gap], before: Phase, during: Phase, after: Phase) -> OutageReport:
    """``gaps`` are one rank's.

    Raises:
        ValueError: a phase has fewer than two steps to compare.
    """
    seconds = [phase.a_seconds(gaps) for phase in (before, during, after)]
    if min(map(len, seconds)) < _FEWEST_STEPS:
        raise ValueError(
            f"every phase needs at least {_FEWEST_STEPS} channel-A steps, got {[len(each) for each in seconds]}"
        )
    first, second, third = seconds
    usual_wait_s = statistics.median(
        gap.waiting_s for gap in gaps if before.start <= gap.start < before.end and gap.channel == "A"
    )
    waits = [gap.waiting_s - usual_wait_s for gap in gaps if during.start <= gap.start < during.end]
    return OutageReport(
        num_before=len(first),
        num_during=len(second),
        num_after=len(third),
        median_before_s=statistics.median(first),
        during=_ratio(second, first),
        after=_ratio(third, first),
        during_to_both=_ratio(second, [*first, *third]),
        longest_wait_s=max(waits),
        b_steps=(before.b_steps(gaps), during.b_steps(gaps), after.b_steps(gaps)),
    )


def _ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    def of_medians(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        quotient: np.ndarray = np.median(x, axis=axis) / np.median(y, axis=axis)
        return quotient

    value = statistics.median(numerator) / statistics.median(denominator)
    interval = bootstrap(
        (np.asarray(numerator), np.asarray(denominator)),
        of_medians,
        n_resamples=_NUM_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(value, float(interval.low), float(interval.high))
