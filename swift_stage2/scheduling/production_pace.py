"""Turns measured production times into the two numbers the pacer plans with.

A production runs from a POST to its last pack in the queue. *Typical* says when packs will arrive;
*quick* says how soon the rounds that it held may resume, so that a lucky production does not age its
own packs. The pipeline observes; the pacer reads; `RankFacts` carries the pace to the other ranks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT_PRODUCTIONS = 16
QUICK_QUANTILE = 0.1


@dataclass(frozen=True, slots=True)
class ProductionPace:
    """How long a production takes, in optimizer steps."""

    typical_steps: float
    """The median."""
    quick_steps: float
    """The lower decile; at most ``typical_steps``."""

    @classmethod
    def of(cls, typical_steps: float, quick_steps: float | None) -> ProductionPace:
        """Make a pace; ``quick_steps`` None stands for "as typical"."""
        return cls(typical_steps, typical_steps if quick_steps is None else quick_steps)

    def slower(self, other: ProductionPace) -> ProductionPace:
        """Return the slower of both, number by number, as an element-wise MAX over ranks does."""
        return ProductionPace(
            max(self.typical_steps, other.typical_steps), max(self.quick_steps, other.quick_steps)
        )


class ProductionMeter:
    """Remembers the last 16 productions of one rank. One writer, the rank's pipeline."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=RECENT_PRODUCTIONS)
        self._pace: ProductionPace | None = None

    @property
    def pace(self) -> ProductionPace | None:
        """The pace over the last productions; None before the first. One attribute, safe from any thread."""
        return self._pace

    def observe(self, steps: float) -> None:
        """Take in one production that took ``steps`` optimizer steps.

        Raises:
            ValueError: ``steps`` is negative or not finite.
        """
        if not (math.isfinite(steps) and steps >= 0):
            raise ValueError(
                f"a production takes a finite time >= 0, got steps={steps}; check the step counter"
            )
        self._steps.append(steps)
        ordered = sorted(self._steps)
        self._pace = ProductionPace(median(ordered), ordered[int(QUICK_QUANTILE * len(ordered))])
