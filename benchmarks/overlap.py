"""``swift-stage2 bench overlap``: asynchronous against inline on the same work, and how much of the bound is reached.

Inline is the same learner, which waits at every wanted B step until its packs are made. Its own stage times give the
bound (Amdahl): with perfect overlap a run takes as long as the longer of learner and pipeline. The third arm is channel
A alone, which tells what B steps and rounds cost besides.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from benchmarks.clocks import since
from benchmarks.estimates import verdict
from benchmarks.learner_job import NUM_WARMUP, Arm, ArmRecords, run_arm, write_rows
from benchmarks.results import ResultTable, in_turns, publish, spread_table
from benchmarks.servers import BenchServers, start_stand_in
from swift_stage2 import config
from swift_stage2.errors import ChildFailed

BUDGET = 0.9
B_RATIO = 0.25


class Mode(StrEnum):
    """A run does one of these at a wanted B step."""

    ASYNC = "asynchronous"  # Trains the packs that are ready, as a user's run does
    INLINE = "inline"  # Makes its packs then, and waits for them
    A_ONLY = "A only"  # There are none


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRun:
    """One run after its warm-up. Seconds."""

    seconds: float
    waited: float
    """Inline: for production, at all B steps together."""
    num_b_wanted: int
    num_b_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    asynchronous: OverlapRun
    inline: OverlapRun
    a_only: OverlapRun

    @property
    def learner(self) -> float:
        return self.inline.seconds - self.inline.waited

    @property
    def bound(self) -> float:
        """The speed-up that perfect overlap of the inline run's own stages would give."""
        return self.inline.seconds / max(self.learner, self.inline.waited)

    @property
    def speed_up(self) -> float:
        return self.inline.seconds / self.asynchronous.seconds

    @property
    def fraction(self) -> float:
        return self.speed_up / self.bound


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises ChildFailed when a process did not end well, or the inline run skipped a B step."""
    rows = write_rows(directory)
    runs: dict[int, dict[Mode, OverlapRun]] = defaultdict(dict)
    with BenchServers(directory / "logs") as servers:
        ports = start_stand_in(servers, rows, options.latency_s)
        for number, mode in in_turns(Mode, options.repeats):
            name = f"{number}-{mode.name.lower()}"
            arm = Arm(
                name=name,
                directory=directory / name,
                rows=rows,
                num_steps=options.steps,
                b_ratio=0.0 if mode is Mode.A_ONLY else B_RATIO,
                ports=ports,
                mode=config.Mode.INLINE if mode is Mode.INLINE else config.Mode.ASYNC,
            )
            runs[number][mode] = run_of(mode, run_arm(servers, arm), NUM_WARMUP)
    repetitions = [
        Repetition(asynchronous=each[Mode.ASYNC], inline=each[Mode.INLINE], a_only=each[Mode.A_ONLY])
        for each in runs.values()
    ]
    publish(
        directory,
        "overlap",
        overlap_table(repetitions, options.steps - NUM_WARMUP),
        note(repetitions),
    )
    return 0


def run_of(mode: Mode, records: ArmRecords, num_warmup: int) -> OverlapRun:
    """Reads one run's steps after its first ``num_warmup``.

    Raises ChildFailed: an inline run skipped a wanted B step: it did not do the work that it is compared by.
    """
    steps = [step for number, step in records.events.steps.items() if number >= num_warmup]
    run = OverlapRun(
        seconds=since(records.clock, "end_ns", num_warmup),
        waited=sum(step.plan_seconds for step in steps if mode is Mode.INLINE and step.wants_b),
        num_b_wanted=sum(step.wants_b for step in steps),
        num_b_run=sum(step.channel == "B" for step in steps),
    )
    if mode is Mode.INLINE and run.num_b_run < run.num_b_wanted:
        raise ChildFailed(
            f"an inline run must run every wanted B step, it ran {run.num_b_run} of {run.num_b_wanted}; "
            "see the learner's log"
        )
    return run


def overlap_table(repetitions: Sequence[Repetition], num_steps: int) -> ResultTable:
    """One row per repetition, and their medians (quartiles)."""
    names = [str(number) for number, _ in enumerate(repetitions, 1)]
    rows = {**{name: [each] for name, each in zip(names, repetitions, strict=True)}, "all": repetitions}
    table = spread_table(
        f"Asynchronous against inline, {num_steps} steps after the warm-up, b_ratio {B_RATIO}: median (quartiles)",
        "repetition",
        rows,
        {
            "asynchronous, s": (1, lambda each: each.asynchronous.seconds),
            "inline, s": (1, lambda each: each.inline.seconds),
            "A only, s": (1, lambda each: each.a_only.seconds),
            "inline: learner, s": (1, lambda each: each.learner),
            "inline: pipeline, s": (1, lambda each: each.inline.waited),
            "speed-up": (3, lambda each: each.speed_up),
            "bound": (3, lambda each: each.bound),
            "fraction of the bound": (3, lambda each: each.fraction),
        },
    )
    singles = [tuple(cell.partition(" (")[0] for cell in row) for row in table.rows[:-1]]
    return replace(table, rows=[*singles, table.rows[-1]])


def note(repetitions: Sequence[Repetition]) -> str:
    fraction = float(np.median([each.fraction for each in repetitions]))
    skipped = sum(each.asynchronous.num_b_wanted - each.asynchronous.num_b_run for each in repetitions)
    less_work = (
        f" The asynchronous runs skipped {skipped} wanted B steps and so did less work: lower --latency-s."
        if skipped
        else ""
    )
    return (
        f"Fraction of the Amdahl bound, median {fraction:.3f}, budget at least {BUDGET}: "
        f"{verdict(fraction >= BUDGET)}.{less_work}"
    )
