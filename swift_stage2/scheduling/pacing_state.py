"""What one rank knows when its pipeline asks the pacer whether to make packs.

Positions and durations are in steps, with fractions: the unit in which rounds and the schedule count.
Filled in by the pipeline, read by the pacer.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.scheduling.production_pace import INSTANT, ProductionPace


@dataclass(frozen=True, slots=True)
class PacksInMaking:
    """One production under way: from its POST to its last pack in the queue."""

    version: int
    num_packs: int
    age_steps: float
    """Steps since its POST was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingState:
    """A snapshot of one rank."""

    step: int
    """The step that trains now; -1 before the first."""
    progress: float = 0.0
    """The share of that step that has passed, in [0, 1)."""
    current_version: int
    last_commit_step: int
    """The step at whose start the last sync round committed."""
    round_pending: bool = False
    """The fence is closed for a round: a POST asked for now starts after it."""
    ready_versions: tuple[int, ...] = ()
    """Versions of the ready packs, oldest first."""
    making: tuple[PacksInMaking, ...] = ()
    own_pace: ProductionPace | None = None
    """This rank's pace; None before its first production."""
    slowest_pace: ProductionPace = INSTANT
    """The slowest rank's, whose POSTs hold the rounds of all: `GateOutcome.slowest_pace`."""
    packs_per_production: int = 1
    """How many packs one production makes at full size."""
    missed_in_a_row: int = 0
    """Wanted B steps in a row, up to now, at which this rank could not reserve."""

    @property
    def position(self) -> float:
        """Now, in steps."""
        return self.step + self.progress

    @property
    def arrival_pace(self) -> ProductionPace:
        """The pace at which this rank's own packs arrive."""
        return self.own_pace or INSTANT

    @property
    def holding_pace(self) -> ProductionPace:
        """The pace at which productions release the rounds: all ranks start together, the slowest counts."""
        return self.arrival_pace.slower(self.slowest_pace)
