"""What one rank knows when its pipeline asks the pacer whether to make packs.

Positions and durations are in steps, with fractions: the unit in which rounds and the schedule count.
Filled in by the pipeline, read by the pacer.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.scheduling.production_pace import ProductionPace


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
    production_steps: float | None = None
    """How long a production typically takes on this rank; None before the first."""
    quick_production_steps: float | None = None
    """How long a quick one takes, `ProductionPace.quick_steps`; None: as a typical one."""
    slowest_production_steps: float = 0.0
    """The typical production of the slowest rank, whose POSTs hold the rounds of all."""
    slowest_quick_production_steps: float | None = None
    """The quick production of the slowest rank; None: as its typical one."""
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
        return ProductionPace.of(self.production_steps or 0.0, self.quick_production_steps)

    @property
    def holding_pace(self) -> ProductionPace:
        """The pace at which productions release the rounds: all ranks start together, the slowest counts."""
        slowest = ProductionPace.of(self.slowest_production_steps, self.slowest_quick_production_steps)
        return self.arrival_pace.slower(slowest)
