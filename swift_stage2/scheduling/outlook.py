"""Forecasts one rank's near future for the pacer: when packs made now arrive, and which rounds run until then.

Measured production times come in two numbers: *typical* says when packs will arrive, *quick* how soon the rounds
that a production held may resume, so that a lucky one does not age its own packs. In fenced rounds a POST in flight
keeps the fence from draining, and while one is pending no POST starts; in staged ones a POST starts at any time and
holds what its own server installs. Positions and durations are in steps, with fractions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
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
        self.pace: ProductionPace | None = None
        """The pace over the last productions; None before the first. One attribute, safe from any thread."""

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
        self.pace = ProductionPace(median(ordered), ordered[int(QUICK_QUANTILE * len(ordered))])


@dataclass(frozen=True, slots=True)
class PackInMaking:
    """Rollouts that are out, held, or prepared and not packed yet, as many as make a pack."""

    version: int
    """The oldest that one of them was asked under, or answered with."""
    arrival: float
    """The position at which the last of them typically is there."""


def packs_of(rollouts: Iterable[tuple[int, float]], per_pack: float) -> tuple[tuple[PackInMaking, ...], int]:
    """The packs that rollouts of (version, arrival) make in the order in which they come, and how many are over."""
    coming = sorted(rollouts, key=lambda rollout: rollout[1])
    ends = [math.ceil(n * per_pack) for n in range(1, int(len(coming) / per_pack) + 1)]
    packs = [coming[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    in_making = tuple(PackInMaking(min(version for version, _ in pack), pack[-1][1]) for pack in packs)
    return in_making, len(coming) - (ends[-1] if ends else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingState:
    """A snapshot of one rank when its pipeline asks how many packs to begin now."""

    step: int
    """The step that trains now; -1 before the first."""
    progress: float = 0.0
    """The share of that step that has passed, in [0, 1)."""
    current_version: int
    last_commit_step: int
    """The step that the cadence counts from: a fenced round's end, a staged round's snapshot."""
    round_pending: bool = False
    """The fence is closed for a fenced round: a POST asked for now starts after it."""
    rounds_are_staged: bool = False
    """Servers answer while the next weights arrive, so that rounds close no fence."""
    round_in_transfer: bool = False
    """A staged round has begun, and no proof of it has been heard yet."""
    ready_versions: tuple[int, ...] = ()
    """Versions of the ready packs, oldest first."""
    in_making: tuple[PackInMaking, ...] = ()
    """The packs that what was begun before is going to be."""
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
        """The pace at which productions release the rounds: the slowest rank's, because all start together.

        Where rounds are staged nothing makes ranks start together, so that a rank relies on its own alone.
        """
        return self.arrival_pace if self.rounds_are_staged else self.arrival_pace.slower(self.slowest_pace)


@dataclass(frozen=True, slots=True)
class StepView:
    """The learner's word to the pipeline at the start of every step. Times are ``time.monotonic`` seconds."""

    pacing: PacingState  # as far as the learner knows it
    started_s: float
    step_seconds: float | None
    max_prompts: int
    paused: bool
    num_demanded: int | None = None
    """In mode inline: packs that are to be ready, and nothing beyond them. None: the pacer says how many."""

    @property
    def progress(self) -> float:
        """The share of the step that has passed, in [0, 1)."""
        elapsed_s = time.monotonic() - self.started_s
        return min(0.999, elapsed_s / self.step_seconds) if self.step_seconds else 0.0

    def arrival(self, state: PacingState, sent_s: float | None) -> float:
        """The position at which a rollout whose POST left then, or leaves now, is expected to be prepared.

        One that is overdue by n steps is expected in n more: how late it is already is all that is known of it.
        """
        typical_steps = state.arrival_pace.typical_steps
        if sent_s is None or not self.step_seconds:
            return state.position + typical_steps
        steps_out = (time.monotonic() - sent_s) / self.step_seconds
        return state.position + abs(typical_steps - steps_out)


def first_step_after(position: float) -> int:
    """Return the first step that starts after ``position``, in steps with the fraction of the current one."""
    return math.floor(position) + 1


@dataclass(frozen=True, slots=True)
class RoundForecast:
    """The versions of the steps to come."""

    version: int
    """The version until the first of ``rounds``."""
    rounds: tuple[int, ...]
    """Steps whose reservation is the first to meet a new version, ascending, at least one."""
    spacing: int
    """Steps from one round to the next after the last of ``rounds``."""

    def version_at(self, step: int) -> int:
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
        """Forecast the rounds when no production is started; what is out holds them all the same."""
        last_arrival = max((pack.arrival for pack in self.state.in_making), default=0.0)
        held_until = max(self._next_step, math.ceil(last_arrival))
        if self._next_is_staged:
            return self._staged_rounds(held_until)
        first = self._next_step if self.state.round_pending else max(self._due_step, held_until)
        return RoundForecast(self.state.current_version, (first,), self.spacing)

    def rounds_if_made(self, holding_steps: float) -> RoundForecast:
        """Forecast the rounds when a production starts now and holds the next one for ``holding_steps``."""
        # A production that ends with a step's start may release that step's round: the earlier one ages more.
        held_until = max(self._next_step, math.ceil(self.start + holding_steps))
        if self._next_is_staged:
            return self._staged_rounds(held_until)
        if self.state.round_pending:
            pending = self._next_step
            rounds: tuple[int, ...] = (pending, max(pending + self.sync_every_steps, held_until))
        else:
            rounds = (max(self._due_step, held_until),)
        return RoundForecast(self.state.current_version, rounds, self.spacing)

    def _staged_rounds(self, held_until: int) -> RoundForecast:
        """Forecast staged rounds when what is being made lets its server install at ``held_until``.

        Another server may install the first of them meanwhile, but that round ends, and the next begins, only
        when every server has. A round is heard after the packs of that step are reserved: it counts one later.
        """
        if self.state.round_in_transfer:
            begun, heard = min(self._due_step, self.state.step), self._next_step
        else:
            begun = heard = max(self._due_step, self._next_step)
        second = max(begun + self.sync_every_steps, max(heard, held_until) + 1)
        return RoundForecast(self.state.current_version, (heard + 1, second + 1), self.spacing)

    @property
    def _next_is_staged(self) -> bool:
        return self.state.rounds_are_staged and not self.state.round_pending

    @property
    def _next_step(self) -> int:
        return self.state.step + 1

    @property
    def _due_step(self) -> int:
        return self.state.last_commit_step + self.sync_every_steps
