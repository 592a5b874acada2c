"""Compares a run with the same work done inline and with the best that overlap can give. Pure.

Of one rank, over the training part of its main thread:

    S       steps, at the pace of quiet ones        R       sync rounds
    P       the pipeline's work for the packs that were trained          W       what the training part took
    inline = S + R + P      ideal = max(S + R, P)      speed-up = inline / W      bound = inline / ideal
    fraction = speed-up / bound = ideal / W

``docs/design/README.md`` gives the reasons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Start, Step
from swift_stage2.telemetry.timing import NANOSECONDS, Activity, in_seconds

WORKING = ("reading", "asking", "preparing", "packing")
"""Activities of the pipeline thread that an inline run would have to do as well."""
FEWEST_QUIET = 5


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step's cost on this rank's main thread, without rounds, saving and evaluating."""

    step: int
    channel: str
    seconds: float
    is_quiet: bool
    """No rollout was in flight when it began and when it ended, and no round ran at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    rank: int
    steps: Sequence[TrainedStep]
    syncing_s: float
    pipeline_s: Mapping[str, float]
    """The pipeline thread's seconds by activity; empty without its clock."""
    packs_made: int
    packs_trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPace:
    """The cost of one channel's step when nothing disturbs it."""

    channel: str
    num_steps: int
    num_quiet: int
    quiet_s: float
    """Median of the quiet steps, or the lower quartile of all if fewer than ``FEWEST_QUIET`` were quiet."""
    busy_s: float | None
    """Median of the others; None if they are too few."""

    @property
    def is_estimate(self) -> bool:
        """Whether too few steps were quiet."""
        return self.num_quiet < FEWEST_QUIET

    @property
    def slowdown(self) -> float | None:
        """By what share steps beside rollouts are slower; None if that was not measured."""
        if self.is_estimate or self.busy_s is None or not self.quiet_s:
            return None
        return self.busy_s / self.quiet_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One rank's comparison, in seconds; the module's first lines tell how it is computed."""

    rank: int
    paces: tuple[ChannelPace, ...]
    working_s: Mapping[str, float]
    """The pipeline's work by activity, for the packs that were trained."""
    steps_s: float  # S
    rounds_s: float  # R
    rollouts_s: float  # P
    inline_s: float
    ideal_s: float
    wall_s: float  # W
    speed_up: float
    bound: float
    fraction: float

    @property
    def learner_s(self) -> float:
        """S + R: the main thread's time if nothing disturbed it."""
        return self.steps_s + self.rounds_s

    @property
    def learner_binds(self) -> bool:
        """Whether the rollouts would have had time left."""
        return self.learner_s > self.rollouts_s

    @property
    def facts(self) -> dict[str, float]:
        """Every number, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}


def works_of(run: RunData) -> list[RankWork]:
    """Every rank's work up to its last metrics, which alone tell of the pipeline; all of it without any."""
    works = []
    for rank in run.ranks:
        last = rank.metrics
        until, numbers = (math.inf, {}) if last is None else (last.time, last.numbers)
        steps = [step for step in rank.steps.values() if step.time <= until]
        works.append(
            RankWork(
                rank=rank.rank,
                steps=trained_steps(rank, until),
                syncing_s=sum(_spent(step, Activity.SYNCING) for step in steps),
                pipeline_s=in_seconds(last.pipeline_ns if last is not None else None),
                packs_made=int(numbers.get("packs_made", 0)),
                packs_trained=int(numbers.get("packs_trained", 0)),
            )
        )
    return works


def trained_steps(rank: RankEvents, until: float = math.inf) -> list[TrainedStep]:
    """Every step whose successor was told by the same process; the last one's end is not known.

    A step's event is written when its plan is made and tells the main thread's time since the event before. So the
    training of step *s* is told by the event of *s* + 1, and a round by the event of the step before which it ran.
    """
    begins = {start.step for start in rank.of(Start)}
    steps = [step for _, step in sorted(rank.steps.items()) if step.time <= until]
    return [
        TrainedStep(
            step=mine.step,
            channel=mine.channel,
            seconds=_spent(following, Activity.BUSY, Activity.WAITING),
            is_quiet=not (
                mine.infer_in_flight
                or following.infer_in_flight
                or mine.round_in_transfer
                or _spent(following, Activity.SYNCING)
            ),
        )
        for mine, following in pairwise(steps)
        if following.step == mine.step + 1 and following.step not in begins
    ]


def slowest(works: Iterable[RankWork]) -> Speed | str:
    """The comparison of the rank whose training part took longest, or what is missing for one."""
    found = [measure(work) for work in works]
    speeds = [speed for speed in found if isinstance(speed, Speed)]
    if speeds:
        return max(speeds, key=lambda speed: speed.wall_s)
    return next((reason for reason in found if isinstance(reason, str)), "there is no log of a rank")


def measure(work: RankWork) -> Speed | str:
    """One rank's comparison, or what is missing for it."""
    training_s = sum(step.seconds for step in work.steps)
    if not training_s:
        return "no step was timed: a run of two steps or more tells"
    if not any(step.channel == "B" for step in work.steps):
        return "no step on channel B was timed, so nothing ran side by side"
    if not (work.pipeline_s and work.packs_made):
        return "no pack was made before the last logging step"
    share = work.packs_trained / work.packs_made
    paces = tuple(paces_of(work.steps))
    working_s = {name: work.pipeline_s.get(name, 0.0) * share for name in WORKING}
    steps_s = sum(pace.num_steps * pace.quiet_s for pace in paces)
    rounds_s, rollouts_s = work.syncing_s, sum(working_s.values())
    inline_s, ideal_s = steps_s + rounds_s + rollouts_s, max(steps_s + rounds_s, rollouts_s)
    wall_s = training_s + rounds_s
    return Speed(
        rank=work.rank,
        paces=paces,
        working_s=working_s,
        steps_s=steps_s,
        rounds_s=rounds_s,
        rollouts_s=rollouts_s,
        inline_s=inline_s,
        ideal_s=ideal_s,
        wall_s=wall_s,
        speed_up=inline_s / wall_s,
        bound=inline_s / ideal_s,
        fraction=ideal_s / wall_s,
    )


def paces_of(steps: Sequence[TrainedStep]) -> list[ChannelPace]:
    return [
        _pace(channel, [step for step in steps if step.channel == channel])
        for channel in sorted({step.channel for step in steps})
    ]


def _pace(channel: str, steps: Sequence[TrainedStep]) -> ChannelPace:
    quiet = [step.seconds for step in steps if step.is_quiet]
    busy = [step.seconds for step in steps if not step.is_quiet]
    enough = len(quiet) >= FEWEST_QUIET
    return ChannelPace(
        channel=channel,
        num_steps=len(steps),
        num_quiet=len(quiet),
        quiet_s=statistics.median(quiet) if enough else _lower_quartile([step.seconds for step in steps]),
        busy_s=statistics.median(busy) if len(busy) >= FEWEST_QUIET else None,
    )


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def _spent(step: Step, *activities: Activity) -> float:
    return sum(step.activity_ns.get(activity, 0) for activity in activities) / NANOSECONDS
