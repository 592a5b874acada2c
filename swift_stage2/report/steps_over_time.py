"""Turns a rank's step records into what each step cost, and series into few enough points to draw. Pure.

A step's record is written when its plan is made and tells the main thread's time since the record before. So the
training of step *s* is told by the record of *s* + 1, and a round by the record of the step before which it ran.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swift_stage2.telemetry.activity import NANOSECONDS, Activity
from swift_stage2.telemetry.rank_records import RankRecords

MOST_POINTS = 300
_TRAINING = (Activity.BUSY, Activity.WAITING)


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """What one step cost this rank's main thread, without rounds, saving and evaluating."""

    step: int
    channel: str
    seconds: float
    is_quiet: bool
    """No rollout was in flight when it began and when it ended, and no round ran at its end."""


def trained_steps(records: RankRecords) -> list[TrainedStep]:
    """Every step whose successor was recorded by the same process; the last one's end is not known."""
    begins = {start["step"] for start in records.starts}
    steps = [records.steps[number] for number in sorted(records.steps)]
    return [
        TrainedStep(
            step=mine["step"],
            channel=mine["channel"],
            seconds=_spent(following, _TRAINING),
            is_quiet=not (
                mine["infer_in_flight"]
                or following["infer_in_flight"]
                or _spent(following, (Activity.SYNCING,))
            ),
        )
        for mine, following in pairwise(steps)
        if following["step"] == mine["step"] + 1 and following["step"] not in begins
    ]


def syncing_seconds(records: RankRecords) -> float:
    """The main thread's seconds in sync rounds."""
    return sum(_spent(step, (Activity.SYNCING,)) for step in records.steps.values())


def seconds_by_activity(record: Mapping[str, object]) -> dict[str, float]:
    """Of one step or metrics record; empty without a clock."""
    spent = record.get("activity_ns")
    return _in_seconds(spent) if isinstance(spent, Mapping) else {}


def pipeline_seconds(record: Mapping[str, object]) -> dict[str, float] | None:
    """Of one metrics record: the pipeline thread's seconds by activity; None without its clock."""
    spent = record.get("pipeline_ns")
    return _in_seconds(spent) if isinstance(spent, Mapping) and spent else None


def thinned(
    points: Sequence[tuple[float, float]],
    most: int = MOST_POINTS,
    summary: Callable[[Sequence[float]], float] = statistics.fmean,
) -> list[tuple[float, float]]:
    """At most ``most`` points: the ``summary`` of groups of neighbours of one size, each at its first place."""
    size = max(1, -(-len(points) // most))
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(group[0][0], summary([value for _, value in group])) for group in groups]


def sampled(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points of a total that only grows: every so many, and the last."""
    size = max(1, -(-len(points) // most))
    kept = list(points[::size])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _in_seconds(spent: Mapping[str, int]) -> dict[str, float]:
    return {str(name): ns / NANOSECONDS for name, ns in spent.items()}


def _spent(step: Mapping[str, Mapping[str, int]], activities: Iterable[str]) -> float:
    return sum(step["activity_ns"].get(activity, 0) for activity in activities) / NANOSECONDS
