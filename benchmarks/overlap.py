"""``swift-stage2 bench overlap``: asynchronous against inline on the same work, and how much of the bound is reached.

Inline is the same learner, which waits at every wanted B step until its packs are made. Its own stage times give the
bound (Amdahl): with perfect overlap a run takes as long as the longer of learner and pipeline. The third arm is channel
A alone, which tells what B steps and rounds cost besides.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from benchmarks.benches import STAND_IN
from benchmarks.child_runs import ChildRuns
from benchmarks.clocks import since
from benchmarks.cores import split_cores, started_on
from benchmarks.estimates import verdict
from benchmarks.interference import B_RATIO
from benchmarks.learner_job import Arm, ArmRecords, run_arm, write_rows
from benchmarks.results import ResultTable, in_turns, publish, spread_table
from benchmarks.servers import BenchServers, ServerKind, start_stand_in
from swift_stage2 import config
from swift_stage2.errors import ChildFailed

BUDGET = 0.9
NUM_WARMUP = 8


class Mode(StrEnum):
    """A run does one of these at a wanted B step."""

    ASYNC = "asynchronous"  # Trains the packs that are ready, as a user's run does
    INLINE = "inline"  # Makes its packs then, and waits for them
    A_ONLY = "A only"  # There are none


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRun:
    """One run after its warm-up. Seconds."""

    mode: Mode
    seconds: float
    waited: float
    """Inline: for production, at all B steps together."""
    num_b_wanted: int
    num_b_run: int
    num_rollouts: int
    """Of the whole run."""


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
    with BenchServers(directory / "logs") as servers, ChildRuns() as children, ExitStack() as stack:
        if options.server == STAND_IN:
            ports = start_stand_in(servers, rows, options.latency_s)
        else:
            with started_on(split_cores()[1]):
                ports = servers.start(ServerKind(options.server)).ports
            stack.enter_context(started_on(split_cores()[0]))
        learner_cores = sorted(os.sched_getaffinity(0))
        for number, mode in in_turns(Mode, options.repeats):
            arm = Arm(
                name=mode.name.lower(),
                directory=directory / f"{number}-{mode.name.lower()}",
                rows=rows,
                num_steps=options.steps,
                b_ratio=0.0 if mode is Mode.A_ONLY else B_RATIO,
                ports=ports,
                mode=config.Mode.INLINE if mode is Mode.INLINE else config.Mode.ASYNC,
            )
            runs[number][mode] = run_of(mode, run_arm(children, arm), NUM_WARMUP)
    repetitions = [
        Repetition(asynchronous=each[Mode.ASYNC], inline=each[Mode.INLINE], a_only=each[Mode.A_ONLY])
        for each in runs.values()
    ]
    facts = {
        "server": options.server,
        "latency_s": options.latency_s if options.server == STAND_IN else None,
        "steps": options.steps - NUM_WARMUP,
        "b_ratio": B_RATIO,
        "learner_cores": learner_cores,
        "repetitions": [
            asdict(each) | {"bound": each.bound, "speed_up": each.speed_up, "fraction": each.fraction}
            for each in repetitions
        ],
    }
    tables = [overlap_table(repetitions, options.steps - NUM_WARMUP), work_table(repetitions)]
    publish(directory, "overlap", facts, *tables, *notes(repetitions, options.server))
    return 0


def run_of(mode: Mode, records: ArmRecords, num_warmup: int) -> OverlapRun:
    """Reads one run's steps after its first ``num_warmup``.

    Raises ChildFailed: an inline run skipped a wanted B step: it did not do the work that it is compared by.
    """
    steps = [record for record in records.of_kind("step") if record["step"] >= num_warmup]
    run = OverlapRun(
        mode=mode,
        seconds=since(records.clock, "end_ns", num_warmup),
        waited=sum(step["plan_seconds"] for step in steps if mode is Mode.INLINE and step["wants_b"]),
        num_b_wanted=sum(bool(step["wants_b"]) for step in steps),
        num_b_run=sum(step["channel"] == "B" for step in steps),
        num_rollouts=sum(batch["num_rollouts"] for batch in records.of_kind("batch")),
    )
    if mode is Mode.INLINE and run.num_b_run < run.num_b_wanted:
        raise ChildFailed(
            f"an inline run must run every wanted B step, it ran {run.num_b_run} of {run.num_b_wanted}; "
            "see the learner's log"
        )
    return run


def overlap_table(repetitions: Sequence[Repetition], num_steps: int) -> ResultTable:
    columns: dict[str, tuple[int, Callable[[Repetition], float]]] = {
        "asynchronous, s": (1, lambda each: each.asynchronous.seconds),
        "inline, s": (1, lambda each: each.inline.seconds),
        "A only, s": (1, lambda each: each.a_only.seconds),
        "inline: learner, s": (1, lambda each: each.learner),
        "inline: pipeline, s": (1, lambda each: each.inline.waited),
        "speed-up": (3, lambda each: each.speed_up),
        "bound": (3, lambda each: each.bound),
        "fraction of the bound": (3, lambda each: each.fraction),
    }
    title = (
        f"Asynchronous against inline, {num_steps} steps after the warm-up, b_ratio {B_RATIO}; the last row is median "
        "(quartiles)"
    )
    table = spread_table(title, "repetition", {"all": repetitions}, columns)
    rows = [
        (str(number), *(f"{value(each):.{digits}f}" for digits, value in columns.values()))
        for number, each in enumerate(repetitions, 1)
    ]
    return replace(table, rows=[*rows, *table.rows])


def work_table(repetitions: Sequence[Repetition]) -> ResultTable:
    rows = [
        (f"{number}, {run.mode}", f"{run.num_b_run} of {run.num_b_wanted}", str(run.num_rollouts))
        for number, each in enumerate(repetitions, 1)
        for run in (each.asynchronous, each.inline)
    ]
    return ResultTable("Work of the arms", ("repetition, arm", "B steps run of wanted", "rollouts"), rows)


def notes(repetitions: Sequence[Repetition], server: str) -> list[str]:
    fraction = float(np.median([each.fraction for each in repetitions]))
    found = [
        f"Rollouts from {server}. Fraction of the Amdahl bound, median {fraction:.3f}, budget at least {BUDGET}: "
        f"{verdict(fraction >= BUDGET)}."
    ]
    skipped = sum(each.asynchronous.num_b_wanted - each.asynchronous.num_b_run for each in repetitions)
    if skipped:
        found.append(
            f"The asynchronous runs skipped {skipped} wanted B steps and so did less work; production must be faster "
            "than training for this comparison: lower --latency-s."
        )
    return found
