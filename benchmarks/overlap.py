"""``swift-stage2 bench overlap``: asynchronous against inline on the same work, and how much of the bound is reached.

Inline is the same learner, which waits at every wanted B step until its packs are made. Its own stage times give the
bound (Amdahl): with perfect overlap a run takes as long as the longer of learner and pipeline. The third arm is channel
A alone, which tells what B steps and rounds cost besides.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from benchmarks.faults.bench_options import refuse_below
from benchmarks.results import ResultTable, publish
from benchmarks.servers import BenchServers, ServerKind
from benchmarks.spread import Spread, verdict
from benchmarks.stand_in_job import PLUGINS, Arm, ArmRecords, run_arm, start_stand_in
from benchmarks.thread_times import WAITS_FILE
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.scene_files import write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.launch.cores import split_cores, started_on
from swift_stage2.output_directory import claim_directory

BUDGET = 0.9
B_RATIO = 0.25
STAND_IN = "stand-in"
_WARMUP_STEPS = 8
_STEPS = 88
_REPEATS = 3
_LATENCY_S = 0.5
_NUM_ROWS = 512


class Mode(StrEnum):
    """What a run does at a wanted B step."""

    ASYNC = "asynchronous"
    """Trains the packs that are ready, as a user's run does."""
    INLINE = "inline"
    """Makes its packs then, and waits for them."""
    A_ONLY = "A only"
    """There are none."""


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
    """The three runs of one repetition."""

    asynchronous: OverlapRun
    inline: OverlapRun
    a_only: OverlapRun

    @property
    def learner(self) -> float:
        """Inline seconds without the waits."""
        return self.inline.seconds - self.inline.waited

    @property
    def bound(self) -> float:
        """The speed-up that perfect overlap of the inline run's own stages would give."""
        return self.inline.seconds / max(self.learner, self.inline.waited)

    @property
    def speed_up(self) -> float:
        """Inline over asynchronous."""
        return self.inline.seconds / self.asynchronous.seconds

    @property
    def fraction(self) -> float:
        """Of the bound, reached."""
        return self.speed_up / self.bound


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all arms, prints the tables and writes ``overlap.json`` and ``overlap.md``.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
        ChildFailed: a process did not end well, or the inline run skipped a B step.
    """
    options = _parse(argv)
    directory = claim_directory(options.output, keep=options.keep)
    rows = write_scenes(directory, SceneKind.SHAPES, num_train=_NUM_ROWS, num_held_out=1, seed=0).train
    repetitions = []
    with BenchServers(directory / "logs") as servers, ChildRuns() as children, ExitStack() as stack:
        if options.server == STAND_IN:
            ports = start_stand_in(servers, rows, options.latency_s)
        else:
            with started_on(split_cores()[1]):
                server = servers.start(ServerKind(options.server))
            ports = (int(server.base_url.rsplit(":", 1)[1]), server.group_port)
            stack.enter_context(started_on(split_cores()[0]))
        learner_cores = sorted(os.sched_getaffinity(0))
        for number in range(options.repeats):
            runs: dict[Mode, OverlapRun] = {}
            for mode in list(Mode)[:: 1 if number % 2 == 0 else -1]:
                print(f"[bench] repetition {number + 1} of {options.repeats}: {mode}", flush=True)
                arm = _arm(mode, directory / f"{number}-{mode.name.lower()}", rows, options.steps, ports)
                runs[mode] = run_of(mode, run_arm(children, arm), waits_of(arm), _WARMUP_STEPS)
            repetitions.append(
                Repetition(asynchronous=runs[Mode.ASYNC], inline=runs[Mode.INLINE], a_only=runs[Mode.A_ONLY])
            )
    facts = {
        "server": options.server,
        "latency_s": options.latency_s if options.server == STAND_IN else None,
        "steps": options.steps - _WARMUP_STEPS,
        "b_ratio": B_RATIO,
        "learner_cores": learner_cores,
        "repetitions": [
            asdict(each) | {"bound": each.bound, "speed_up": each.speed_up, "fraction": each.fraction}
            for each in repetitions
        ],
    }
    tables = [overlap_table(repetitions, options.steps - _WARMUP_STEPS), work_table(repetitions)]
    publish(directory, "overlap", facts, tables, notes(repetitions, options.server))
    return 0


def run_of(mode: Mode, records: ArmRecords, waits: Mapping[int, float], num_warmup: int) -> OverlapRun:
    """What one run says of the steps after its first ``num_warmup``; ``waits`` are seconds by step.

    Raises:
        ChildFailed: an inline run skipped a wanted B step: it did not do the work that it is compared by.
    """
    steps = [record for record in records.of_kind("step") if record["step"] >= num_warmup]
    end_ns = records.clock["end_ns"]
    run = OverlapRun(
        mode=mode,
        seconds=(end_ns[-1] - end_ns[num_warmup - 1]) / 1e9,
        waited=sum(seconds for step, seconds in waits.items() if step >= num_warmup),
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
    """One row per repetition, and their medians."""
    columns = (
        [each.asynchronous.seconds for each in repetitions],
        [each.inline.seconds for each in repetitions],
        [each.a_only.seconds for each in repetitions],
        [each.learner for each in repetitions],
        [each.inline.waited for each in repetitions],
        [each.speed_up for each in repetitions],
        [each.bound for each in repetitions],
        [each.fraction for each in repetitions],
    )
    digits = (1, 1, 1, 1, 1, 3, 3, 3)
    rows = [
        (str(number + 1), *(f"{column[number]:.{n}f}" for column, n in zip(columns, digits, strict=True)))
        for number in range(len(repetitions))
    ]
    medians = (Spread.of(column).words(n) for column, n in zip(columns, digits, strict=True))
    return ResultTable(
        f"Asynchronous against inline, {num_steps} steps after the warm-up, b_ratio {B_RATIO}; the last row is median "
        "(quartiles)",
        (
            "repetition",
            "asynchronous, s",
            "inline, s",
            "A only, s",
            "inline: learner, s",
            "inline: pipeline, s",
            "speed-up",
            "bound",
            "fraction of the bound",
        ),
        (*rows, ("all", *medians)),
    )


def work_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """Whether the arms did the same work."""
    rows = []
    for number, each in enumerate(repetitions):
        for run in (each.asynchronous, each.inline):
            steps = f"{run.num_b_run} of {run.num_b_wanted}"
            rows.append((f"{number + 1}, {run.mode}", steps, str(run.num_rollouts)))
    return ResultTable(
        "Work of the arms", ("repetition, arm", "B steps run of wanted", "rollouts"), tuple(rows)
    )


def notes(repetitions: Sequence[Repetition], server: str) -> list[str]:
    """What the budget says, and of which server."""
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


def _arm(mode: Mode, directory: Path, rows: Path, num_steps: int, ports: tuple[int, int]) -> Arm:
    return Arm(
        name=mode.name.lower(),
        directory=directory,
        rows=rows,
        num_steps=num_steps,
        b_ratio=0.0 if mode is Mode.A_ONLY else B_RATIO,
        ports=ports,
        plugin=PLUGINS / "inline_plugin.py" if mode is Mode.INLINE else None,
    )


def waits_of(arm: Arm) -> dict[int, float]:
    path = arm.directory / WAITS_FILE
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["seconds"] for line in lines}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench overlap",
        description="Asynchronous production against the same work done inline, as a fraction of the Amdahl bound of "
        "the inline run's own stage times. Takes roughly 10 minutes on two cores. Exit status 0: everything was "
        "measured.",
    )
    parser.add_argument(
        "--server",
        choices=(STAND_IN, ServerKind.TRANSFORMERS.value),
        default=STAND_IN,
        help="stand-in waits and does not compute; transformers generates on the other half of the cores "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--latency-s",
        type=float,
        default=_LATENCY_S,
        help="mean wait of a rollout from the stand-in (default %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=_STEPS,
        help=f"optimizer steps per run, the first {_WARMUP_STEPS} not counted (default %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=_REPEATS, help="repetitions (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-overlap"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    refuse_below("repeats", options.repeats, 1, _REPEATS)
    refuse_below("steps", options.steps, 2 * _WARMUP_STEPS, _STEPS)
    if not 0 < options.latency_s <= 10:
        raise UserError(
            f"--latency-s must be above 0 and at most 10, got {options.latency_s}; write {_LATENCY_S}"
        )
    return options
