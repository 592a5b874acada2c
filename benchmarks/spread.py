"""Turns repeated measurements into a median with quartiles, and costs at several sizes into an exponent. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of one quantity."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
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

    Raises:
        ValueError: fewer than two different sizes, or something that is not above 0.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(costs) or min(*sizes, *costs) <= 0:
        raise ValueError(
            f"an exponent needs costs above 0 at two different sizes, got sizes={list(sizes)} costs={list(costs)}"
        )
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def verdict(holds: bool) -> str:
    """What a table says beside a budget."""
    return "held" if holds else "missed"


def mean_and_range(values: Sequence[float], form: str) -> str:
    """``mean (lowest..highest)``, the mean alone where all are equal; ``form`` is a format of one number."""
    mean = format(statistics.fmean(values), form)
    return mean if min(values) == max(values) else f"{mean} ({min(values):{form}}..{max(values):{form}})"
