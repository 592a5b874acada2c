"""Forecasts one rank's near future for the pacer: when packs made now arrive, and which rounds run until then.

Measured production times come in two numbers: *typical* says when packs will arrive, *quick* how soon the rounds
that a production held may resume, so that a lucky one does not age its own packs. A POST in flight keeps the fence
from draining; while a round is pending no POST starts. Positions and durations are in steps, with fractions.
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
    """How long a production takes, from its POST to its last pack in the queue, in optimizer steps."""

    typical_steps: float
    """The median."""
    quick_steps: float
    """The lower decile; at most ``typical_steps``."""

    def slower(self, other: ProductionPace) -> ProductionPace:
        """Return the slower of both, number by number, as an element-wise MAX over ranks does."""
        return ProductionPace(
            max(self.typical_steps, other.typical_steps), max(self.quick_steps, other.quick_steps)
        )


INSTANT = ProductionPace(0.0, 0.0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingState:
    """A snapshot of one rank when its pipeline asks whether to make packs; nothing is being made then."""

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
    pace: ProductionPace | None = None
    """This rank's; None before its first production."""
    slowest_pace: ProductionPace = INSTANT
    """The slowest rank's, whose POSTs hold the rounds of all."""
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
        return self.pace or INSTANT

    @property
    def holding_pace(self) -> ProductionPace:
        """The pace at which productions release the rounds: all ranks start together, the slowest counts."""
        return self.arrival_pace.slower(self.slowest_pace)


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


@dataclass(frozen=True, slots=True)
class Outlook:
    """The near future of one rank, as far as it follows from what is known now."""

    state: PacingState
    sync_every_steps: int
    spacing: int
    """Steps between rounds beyond the next one."""

    @property
    def start(self) -> float:
        """The position at which a POST asked for now is sent."""
        return self._next_step if self.state.round_pending else self.state.position

    @property
    def version_at_start(self) -> int:
        """The version of the packs that such a POST makes."""
        return self.state.current_version + self.state.round_pending

    @property
    def arrival(self) -> int:
        """The first step that can reserve them, if their production is a typical one."""
        return first_step_after(self.start + self.state.arrival_pace.typical_steps)

    def rounds_if_idle(self) -> RoundForecast:
        """Forecast the rounds when no production is started."""
        first = self._next_step if self.state.round_pending else max(self._due_step, self._next_step)
        return RoundForecast(self.state.current_version, (first,), self.spacing)

    def rounds_if_made(self, holding_steps: float) -> RoundForecast:
        """Forecast the rounds when a production starts now and holds the next one for ``holding_steps``."""
        # A production that ends with a step's start may release that step's round: the earlier one ages more.
        held_until = max(self._next_step, math.ceil(self.start + holding_steps))
        if self.state.round_pending:
            pending = self._next_step
            rounds: tuple[int, ...] = (pending, max(pending + self.sync_every_steps, held_until))
        else:
            rounds = (max(self._due_step, held_until),)
        return RoundForecast(self.state.current_version, rounds, self.spacing)

    @property
    def _next_step(self) -> int:
        return self.state.step + 1

    @property
    def _due_step(self) -> int:
        return self.state.last_commit_step + self.sync_every_steps
