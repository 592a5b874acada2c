"""Turns the schedule, the packs at hand and the time that production takes into "begin so many packs now".

A pack is worth making for a wanted B step that lacks it and lies within the *horizon*: from the first step that can
reserve a pack begun now to the end of the versions for which it may be trained, or of the next production where that
takes longer, as far as a stock of ready packs goes. What is at hand stays fresh meanwhile, because the next version
waits for it (``VersionSchedule``). Too early and it delays versions, too late and the step is skipped. Pure: the
pipeline asks whenever places are free. Positions and durations are in steps, with fractions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from swift_stage2.scheduling.bresenham import next_wanted_step
from swift_stage2.scheduling.version_clock import is_fresh

RECENT_PRODUCTIONS = 32
ON_TIME = 0.9
MISSES_BEFORE_CATCHING_UP = 2


class ProductionMeter:
    """Remembers the last 32 productions of one rank, of rollouts or whole groups. One writer, its pipeline."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=RECENT_PRODUCTIONS)
        self.typical_steps: float | None = None
        """Their median, from a request to its pack in the queue; None before the first."""
        self.slow_steps: float | None = None
        """Within which nine in ten of them were there."""

    def observe(self, steps: float) -> None:
        self._steps.append(steps)
        ordered = sorted(self._steps)
        self.typical_steps, self.slow_steps = median(ordered), ordered[int(ON_TIME * len(ordered))]


@dataclass(frozen=True, slots=True)
class PackInMaking:
    """Rollouts that are out, held, or prepared and not packed yet, as many as make a pack."""

    version: int
    """The oldest that one of them was asked under, or answered with."""
    arrival: float
    """The position at which the last of them typically is there."""


def packs_of(
    rollouts: Iterable[tuple[int, float]], per_pack: float
) -> tuple[tuple[PackInMaking, ...], tuple[float, ...]]:
    """The packs that rollouts of (version, arrival) make in the order in which they come; arrivals of the rest."""
    coming = sorted(rollouts, key=lambda rollout: rollout[1])
    ends = [math.ceil(n * per_pack) for n in range(1, int(len(coming) / per_pack) + 1)]
    packs = [coming[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    in_making = tuple(PackInMaking(min(version for version, _ in pack), pack[-1][1]) for pack in packs)
    return in_making, tuple(arrival for _, arrival in coming[ends[-1] if ends else 0 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class PacerInputs:
    """The state of one rank when its pipeline asks how many packs to begin now."""

    step: int
    """The step that trains now; -1 before the first."""
    progress: float = 0.0
    """The share of that step that has passed, in [0, 1)."""
    current_version: int
    holds_production: bool = False
    """New weights wait for what is in flight: a POST asked for now starts after them."""
    ready_versions: tuple[int, ...] = ()
    """Versions of the ready packs, oldest first."""
    in_making: tuple[PackInMaking, ...] = ()
    """The packs that what was begun before is going to be."""
    typical_steps: float | None = None
    """Median steps from a request of this rank to its pack in the queue; None before the first pack."""
    slow_steps: float | None = None
    """For groups: steps within which nine in ten are whole. None: rollouts make up for each other."""
    missed_in_a_row: int = 0
    """Wanted B steps in a row, up to now, at which this rank could not reserve."""

    @property
    def position(self) -> float:
        """Now, in steps."""
        return self.step + self.progress

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
    last_call: int | None = None
    """The version that comes before long whatever it makes too old; None: the next one waits."""

    @property
    def progress(self) -> float:
        """The share of the step that has passed, in [0, 1)."""
        elapsed_s = time.monotonic() - self.started_s
        return min(0.999, elapsed_s / self.step_seconds) if self.step_seconds else 0.0

    def arrival(self, inputs: PacerInputs, sent_s: float | None) -> float:
        """The position at which a rollout whose POST left then, or leaves now, is expected to be prepared.

        One that is overdue by n steps is expected in n more: how late it is already is all that is known of it.
        """
        typical_steps = inputs.typical_steps or 0.0
        if sent_s is None or not self.step_seconds:
            return inputs.position + typical_steps
        steps_out = (time.monotonic() - sent_s) / self.step_seconds
        return inputs.position + abs(typical_steps - steps_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacer:
    """The pacing rule of one rank. Holds settings, no state."""

    b_ratio: float
    version_window: int
    sync_every_steps: int
    target_packs: int
    """``prefetch_target_packs``: the packs that should be ready, beside those that are trained as they come."""
    packs_per_b_step: int
    """``gradient_accumulation_steps``."""

    def decide(self, inputs: PacerInputs) -> int:
        """Returns the number of packs to start now, those already in the making not counted.

        Those that the wanted steps within the horizon lack. Before the first measurement, and after two wanted steps
        without packs, it fills up to the target at least. While new weights wait the answer holds for a start right
        after them, so the caller can wait for its ticket; it should ask again with the ticket in hand.
        """
        if self.b_ratio == 0:
            return 0
        room = max(0, self.target_packs - self._num_fresh(inputs, inputs.versions_at_hand))
        if inputs.typical_steps is None:
            return room
        num_lacking = self._num_lacking(inputs, inputs.typical_steps)
        return max(room, num_lacking) if inputs.missed_in_a_row >= MISSES_BEFORE_CATCHING_UP else num_lacking

    def is_starving(self, inputs: PacerInputs) -> bool:
        """Say whether fewer fresh packs are ready than a B step needs."""
        return self.b_ratio > 0 and self._num_fresh(inputs, inputs.ready_versions) < self.packs_per_b_step

    def horizon(self, inputs: PacerInputs, typical_steps: float) -> tuple[int, int]:
        """The first and the last step for which a pack that is begun now is of use.

        The last is that to which the versions of the window last, or, where production takes long, the one that a slow
        production after this one can serve first; and no later than the target lasts from its arrival.
        """
        start = inputs.step + 1 if inputs.holds_production else inputs.position
        first = math.floor(start + typical_steps) + 1
        lasts = max(1, self.version_window) * self.sync_every_steps
        slow_steps = typical_steps if inputs.slow_steps is None else inputs.slow_steps
        last = max(first + math.ceil(slow_steps), math.floor(inputs.position + lasts))
        stock = math.ceil(self.target_packs / (self.packs_per_b_step * self.b_ratio))
        return first, min(last, math.floor(start + slow_steps) + stock)

    def _num_fresh(self, inputs: PacerInputs, versions: Iterable[int]) -> int:
        return sum(self._is_fresh(inputs, version) for version in versions)

    def _is_fresh(self, inputs: PacerInputs, version: int) -> bool:
        return is_fresh(version, current=inputs.current_version, window=self.version_window)

    def _num_lacking(self, inputs: PacerInputs, typical_steps: float) -> int:
        """Walk the wanted steps to come, and count the packs that those within the horizon lack."""
        (first, last), now = self.horizon(inputs, typical_steps), inputs.step + 1
        coming = [pack.arrival for pack in inputs.in_making if self._is_fresh(inputs, pack.version)]
        left = [now] * self._num_fresh(inputs, inputs.ready_versions)
        left += sorted(max(now, math.floor(arrival) + 1) for arrival in coming)
        num_lacking, step = 0, next_wanted_step(now, self.b_ratio)
        while step is not None and step <= last and num_lacking < self.target_packs:
            at_hand = [arrives for arrives in left[: self.packs_per_b_step] if arrives <= step]
            lacking = self.packs_per_b_step - len(at_hand)
            if step >= first:
                num_lacking += lacking
            if step >= first or not lacking:
                left = left[len(at_hand) :]
            serves_more = len(left) >= self.packs_per_b_step
            step = next_wanted_step(step + 1 if serves_more else max(step + 1, first), self.b_ratio)
        return num_lacking


def max_prompts_in_flight(max_inflight_per_server: int, num_proven_servers: int, world_size: int) -> int:
    """Return how many prompts one rank may have in flight: its share of the proven servers, at least one."""
    return max(1, max_inflight_per_server * num_proven_servers // world_size)
