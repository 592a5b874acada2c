"""Turns the schedule, the packs at hand and the time that production takes into "begin so many packs now".

A pack is worth making for a wanted B step that lacks it and lies within the *horizon*: from the first step that can
reserve a pack begun now to the last one at which that is still fresh. Too early and it expires unused, too late and the
step is skipped; ``docs/design/scheduling.md`` has the rule. Pure: the pipeline asks whenever places are free. Positions
and durations are in steps, with fractions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from swift_stage2.scheduling.bresenham import next_wanted_step, wanted_count
from swift_stage2.scheduling.version_clock import is_fresh

RECENT_PRODUCTIONS = 16
QUICK_QUANTILE = 0.1
MISSES_BEFORE_CATCHING_UP = 2
BUSY_LOAD = 0.9  # from this load on forecasts take production as never idle
_SHORTEST_PRODUCTION_STEPS = 1e-3  # keeps the rate of an instant server finite


@dataclass(frozen=True, slots=True)
class ProductionPace:
    """How long a production takes, from its request to its last pack in the queue, in optimizer steps."""

    typical_steps: float
    """The median: when packs arrive."""
    quick_steps: float
    """The lower decile, at most the median: how soon the rounds that a production holds may resume."""

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
class PacerInputs:
    """The state of one rank when its pipeline asks how many packs to begin now."""

    step: int
    """The step that trains now; -1 before the first."""
    progress: float = 0.0
    """The share of that step that has passed, in [0, 1)."""
    current_version: int
    begun_step: int
    """From which the cadence counts, as ``VersionSchedule`` has it: of the version in transfer, if one is."""
    holds_production: bool = False
    """New weights wait for what is in flight: a POST asked for now starts after them."""
    versions_are_staged: bool = False
    """Servers answer while the next weights arrive, so that rounds close no fence."""
    awaits_version: bool = False
    """A version has begun on servers that stage, and no proof of it has been heard yet."""
    ready_versions: tuple[int, ...] = ()
    """Versions of the ready packs, oldest first."""
    in_making: tuple[PackInMaking, ...] = ()
    """The packs that what was begun before is going to be."""
    pace: ProductionPace | None = None
    """This rank's; None before its first production."""
    slowest_pace: ProductionPace = INSTANT
    """The slowest rank's, whose POSTs hold the fenced rounds of all."""
    packs_per_production: int = 1
    """How many packs one production makes at full size."""
    missed_in_a_row: int = 0
    """Wanted B steps in a row, up to now, at which this rank could not reserve."""

    @property
    def position(self) -> float:
        """Now, in steps."""
        return self.step + self.progress

    @property
    def typical_steps(self) -> float:
        return (self.pace or INSTANT).typical_steps

    @property
    def holding_pace(self) -> ProductionPace:
        """The pace at which productions release the rounds: where these are fenced, those of the slowest rank."""
        own = self.pace or INSTANT
        return own if self.versions_are_staged else own.slower(self.slowest_pace)

    @property
    def versions_at_hand(self) -> tuple[int, ...]:
        """Of the packs that are ready or in the making."""
        return (*self.ready_versions, *(pack.version for pack in self.in_making))


@dataclass(frozen=True, slots=True)
class StepView:
    """The learner's word to the pipeline at the start of every step. Times are ``time.monotonic`` seconds."""

    pacing: PacerInputs  # as far as the learner knows it
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

    def arrival(self, inputs: PacerInputs, sent_s: float | None) -> float:
        """The position at which a rollout whose POST left then, or leaves now, is expected to be prepared.

        One that is overdue by n steps is expected in n more: how late it is already is all that is known of it.
        """
        if sent_s is None or not self.step_seconds:
            return inputs.position + inputs.typical_steps
        steps_out = (time.monotonic() - sent_s) / self.step_seconds
        return inputs.position + abs(inputs.typical_steps - steps_out)


def first_step_after(position: float) -> int:
    """Return the first step that starts after ``position``, in steps with the fraction of the current one."""
    return math.floor(position) + 1


@dataclass(frozen=True, slots=True)
class Horizon:
    """The steps for which a pack that is begun now is of use, and the versions of the steps to come."""

    inputs: PacerInputs
    sync_every_steps: int
    version_window: int
    spacing: int
    """Steps between rounds beyond the next two."""

    @property
    def start(self) -> float:
        """The position at which a request that is asked for now is sent."""
        return self._next_step if self.inputs.holds_production else self.inputs.position

    @property
    def first(self) -> int:
        """The first step that can reserve the pack, if its production takes the typical time."""
        return first_step_after(self.start + self.inputs.typical_steps)

    @property
    def released(self) -> int:
        """The first step whose round may run although such a production, a quick one, holds it."""
        return math.ceil(self.start + self.inputs.holding_pace.quick_steps)

    def reaches(self, step: int) -> bool:
        """Whether the pack will be there, and fresh even if its production is a quick one, at ``step``.

        Its first step is always within reach: one step later it would be missed for sure.
        """
        begun_under = self.inputs.current_version + self.inputs.holds_production
        return step == self.first or (step > self.first and self.is_fresh(begun_under, step, self.released))

    def is_fresh(self, version: int, step: int, held_until: int) -> bool:
        return is_fresh(version, current=self.version_at(step, held_until), window=self.version_window)

    @property
    def idle(self) -> int:
        """The first step whose round may run if no production is begun: what is in the making holds it."""
        return max((math.ceil(pack.arrival) for pack in self.inputs.in_making), default=0)

    def version_at(self, step: int, held_until: int) -> int:
        """The version at a step: rounds come by the cadence, but none before ``held_until``.

        A staged round that is heard after the packs of its step are reserved counts one step later.
        """
        inputs, cadence = self.inputs, self.sync_every_steps
        due = inputs.begun_step + cadence
        if inputs.versions_are_staged and not inputs.holds_production:
            begun = inputs.begun_step if inputs.awaits_version else max(due, self._next_step)
            heard = max(begun, self._next_step)
            first, second = heard + 1, max(begun + cadence, max(heard, held_until) + 1) + 1
        else:
            first = self._next_step if inputs.holds_production else max(due, self._next_step, held_until)
            second = max(first + cadence, held_until)
        later = 1 + (step - second) // self.spacing if step >= second else 0
        return inputs.current_version + (step >= first) + later

    @property
    def _next_step(self) -> int:
        return self.inputs.step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacer:
    """The pacing rule of one rank. Holds settings, no state."""

    b_ratio: float
    version_window: int
    sync_every_steps: int
    target_packs: int
    """``prefetch_target_packs``: the most packs at hand that are of use."""
    packs_per_b_step: int
    """``gradient_accumulation_steps``."""

    def decide(self, inputs: PacerInputs) -> int:
        """Returns the number of packs to start now, those already in the making not counted.

        Those that the wanted steps within the horizon lack. Before the first measurement, and after two wanted steps
        without packs, it fills up to the target with what is fresh now. While a round is pending the answer holds for a
        start right after it, so the caller can wait for its ticket; it should ask again with the ticket in hand.
        """
        if self.b_ratio == 0:
            return 0
        if inputs.pace is not None:
            horizon = self._horizon(inputs)
            room = self.target_packs - self._num_fresh_next(horizon, inputs.versions_at_hand)
            num_lacking = max(0, min(room, self._num_lacking(horizon)))
            if num_lacking or room <= 0 or inputs.missed_in_a_row < MISSES_BEFORE_CATCHING_UP:
                return num_lacking
        window, current = self.version_window, inputs.current_version
        at_hand = sum(is_fresh(each, current=current, window=window) for each in inputs.versions_at_hand)
        return max(0, self.target_packs - at_hand)

    def is_starving(self, inputs: PacerInputs) -> bool:
        """Say whether fewer ready packs than a B step needs will be fresh at the next wanted one."""
        if self.b_ratio == 0:
            return False
        return self._num_fresh_next(self._horizon(inputs), inputs.ready_versions) < self.packs_per_b_step

    def next_version(self, inputs: PacerInputs) -> int:
        """Return the version that the next wanted step will reserve against, by the forecast."""
        horizon = self._horizon(inputs)
        return horizon.version_at(self._wanted_from(inputs.step + 1), horizon.idle)

    def load(self, inputs: PacerInputs) -> float:
        """Return the share of its time that production must work to meet the schedule's need; over 1 it cannot."""
        packs_per_step = self.b_ratio * self.packs_per_b_step
        return packs_per_step * self._steps_per_production(inputs)[0] / inputs.packs_per_production

    def _steps_per_production(self, inputs: PacerInputs) -> tuple[float, int]:
        """Steps from one production's start to the next one's, and between rounds, when none waits but for rounds.

        A fenced round waits until the productions that were begun have ended, and the next ones wait for it; a staged
        one is installed between two productions.
        """
        cadence = self.sync_every_steps
        steps = max(inputs.typical_steps, inputs.slowest_pace.typical_steps, _SHORTEST_PRODUCTION_STEPS)
        if inputs.versions_are_staged:
            return steps, max(cadence, math.ceil(steps))
        num_between_rounds = math.ceil(cadence / steps)
        cycle = max(cadence, first_step_after(num_between_rounds * steps))
        return cycle / num_between_rounds, cycle

    def _horizon(self, inputs: PacerInputs) -> Horizon:
        """With rounds as configured, or those of production that is always at work where it hardly idles.

        It hardly does if it is needed most of the time, or if one production would have to serve more wanted steps than
        its packs stay fresh for.
        """
        cadence, (steps, cycle) = self.sync_every_steps, self._steps_per_production(inputs)
        servable = max(1, wanted_count(self.version_window * cadence, self.b_ratio))
        hardly_idles = self.load(inputs) >= BUSY_LOAD or self.b_ratio * steps > servable
        return Horizon(inputs, cadence, self.version_window, cycle if hardly_idles else cadence)

    def _num_fresh_next(self, horizon: Horizon, versions: Sequence[int]) -> int:
        """Count the packs of ``versions`` that will be fresh at the next wanted step."""
        step = self._wanted_from(horizon.inputs.step + 1)
        return sum(horizon.is_fresh(version, step, horizon.idle) for version in versions)

    def _num_lacking(self, horizon: Horizon) -> int:
        """Walk the wanted steps to come, oldest packs first, and count what those within the horizon lack."""
        inputs = horizon.inputs
        now = first_step_after(inputs.position)
        left = [(version, now) for version in inputs.ready_versions]
        left += [(pack.version, max(now, first_step_after(pack.arrival))) for pack in inputs.in_making]
        left.sort()
        num_lacking, step = 0, self._wanted_from(inputs.step + 1)
        while num_lacking < self.target_packs and (step <= horizon.first or horizon.reaches(step)):
            left = [pack for pack in left if horizon.is_fresh(pack[0], step, horizon.released)]
            at_hand = [pack for pack in left if pack[1] <= step][: self.packs_per_b_step]
            lacking = self.packs_per_b_step - len(at_hand)
            if horizon.reaches(step):
                num_lacking += lacking
            if not lacking or step >= horizon.first:
                for pack in at_hand:
                    left.remove(pack)
            has_a_step = len(left) >= self.packs_per_b_step
            step = self._wanted_from(step + 1 if has_a_step else max(step + 1, horizon.first))
        return num_lacking

    def _wanted_from(self, step: int) -> int:
        wanted = next_wanted_step(step, self.b_ratio)
        assert wanted is not None, "b_ratio 0 is answered before any forecast"
        return wanted


def max_prompts_in_flight(max_inflight_per_server: int, num_proven_servers: int, world_size: int) -> int:
    """Return how many prompts one rank may have in flight: its share of the proven servers, at least one."""
    return max(1, max_inflight_per_server * num_proven_servers // world_size)
