"""Where the main thread's and the pipeline thread's time went, over the run and over its steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from swift_stage2.report.content import (
    Chart,
    Mark,
    Part,
    Section,
    Sentence,
    Series,
    Table,
    filled,
    series_of,
    share,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.report.steps_over_time import pipeline_seconds, seconds_by_activity, thinned
from swift_stage2.telemetry.activity import NANOSECONDS
from swift_stage2.telemetry.rank_records import RankRecords


def time_section(run: RunData, shown_rank: int) -> Section:
    """Where the main thread's and the pipeline's time went; the charts show ``shown_rank``."""
    main = {
        r.rank: (seconds_by_activity(r.metrics[-1]), r.metrics[-1]["wall_ns"]) for r in run.ranks if r.metrics
    }
    pipeline = {
        r.rank: (spent, r.metrics[-1].get("pipeline_wall_ns", 0))
        for r in run.ranks
        if r.metrics and (spent := pipeline_seconds(r.metrics[-1])) is not None
    }
    shown = next((records for records in run.ranks if records.rank == shown_rank), None)
    parts: list[Part | None] = [
        _activities("Main thread, seconds by activity", main),
        _main_thread(shown) if shown else None,
        _activities("Pipeline thread, seconds by activity", pipeline),
        _pipeline(shown) if shown else None,
        None if pipeline else Sentence("The pipeline thread has no clock in this run."),
    ]
    return Section("time", "Where time went", filled(parts))


def _activities(title: str, ranks: Mapping[int, tuple[Mapping[str, float], int]]) -> Table:
    names = list(dict.fromkeys(name for spent, _ in ranks.values() for name, value in spent.items() if value))
    rows = []
    for rank, (spent, wall_ns) in ranks.items():
        total, wall = sum(spent.values()), wall_ns / NANOSECONDS
        values = (f"{spent.get(name, 0):.2f}{share(spent.get(name, 0), total)}" for name in names)
        rows.append((str(rank), *values, f"{total:.2f}", f"{wall:.2f}"))
    return Table(title, ("rank", *names, "sum", "wall"), tuple(rows))


def _main_thread(records: RankRecords) -> Chart:
    begins = {start["step"] for start in records.starts}
    steps = [records.steps[number] for number in sorted(records.steps) if number not in begins]
    return Chart(
        key="main_thread",
        title=f"Main thread of rank {records.rank}, seconds per step",
        description="Seconds of the main thread from one plan to the next, by activity, one on top of another.",
        x_title="step",
        y_title="seconds",
        series=_stack([(step["step"], seconds_by_activity(step)) for step in steps]),
    )


def _pipeline(records: RankRecords) -> Chart:
    told = [
        (record["step"], spent, sum(spent.values()))
        for record in records.metrics
        if record["step"] is not None and (spent := pipeline_seconds(record)) is not None
    ]
    between = [
        (
            after[0],
            {
                name: 100 * (after[1][name] - before[1].get(name, 0)) / (after[2] - before[2])
                for name in after[1]
            },
        )
        for before, after in pairwise(told)
        if after[2] > before[2]
    ]
    return Chart(
        key="pipeline",
        title=f"Pipeline thread of rank {records.rank}, share of time",
        description="What the pipeline thread did between two logging steps, in percent of its time.",
        x_title="step",
        y_title="percent",
        series=_stack(between),
    )


def _stack(points: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[Series, ...]:
    names = list(dict.fromkeys(name for _, spent in points for name, value in spent.items() if value))
    return tuple(
        series_of(name, Mark.STACK, thinned([(place, spent.get(name, 0.0)) for place, spent in points]))
        for name in names
    )
