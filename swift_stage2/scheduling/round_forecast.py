"""Turns what is known about the sync rounds now into the version that a later step will train.

A round falls due ``sync_every_steps`` after the last commit and runs at the first step start at which
nothing is in flight. The next ones are given as steps; after the last of them one more follows every
``spacing`` steps. Called by the pacer only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def first_step_after(position: float) -> int:
    """Return the first step that starts after ``position``, in steps with the fraction of the current one."""
    return math.floor(position) + 1


@dataclass(frozen=True, slots=True)
class RoundForecast:
    """The versions of the steps to come."""

    version: int
    """The version until the first of ``rounds``."""
    rounds: tuple[int, ...]
    """Steps at whose start a round runs, ascending, at least one."""
    spacing: int
    """Steps from one round to the next after the last of ``rounds``."""

    def version_at(self, step: int) -> int:
        """Return the version that ``step`` reserves against; a round precedes its step's reservation."""
        named = sum(round_step <= step for round_step in self.rounds)
        regular = max(0, step - self.rounds[-1]) // self.spacing
        return self.version + named + regular
