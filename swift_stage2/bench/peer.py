"""``swift-stage2 bench peer``: our learner's loop and ms-swift's own asynchronous GRPO, beside the same stand-in.

Both train the same tiny model on one rank with one torch thread, and both want rollouts for every step. Each also runs
inline, where steps wait for their rollouts: a step's time less its waits bounds what the asynchronous run can reach.
What the two train is not alike, so that idle shares compare, and steps/s only with a learner's own bound.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_stage2.bench.faults.bench_options import refuse_below
from swift_stage2.bench.grpo_job import COMPLETIONS_PER_STEP, PUSH_NS, ROLLOUT_NS, GrpoArm, run_grpo
from swift_stage2.bench.learner_loop import (
    ASYNCHRONOUS,
    INLINE_OF,
    LearnerLoop,
    LoopArm,
    loop_of,
    share_of_bound,
    since,
)
from swift_stage2.bench.overlap import Mode, run_of, waits_of
from swift_stage2.bench.results import ResultTable, publish
from swift_stage2.bench.servers import BenchServers
from swift_stage2.bench.spread import Spread
from swift_stage2.bench.stand_in_job import PLUGINS, Arm, run_arm, start_stand_in
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.scene_files import write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.errors import UserError
from swift_stage2.launch.cores import split_cores
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.run_directory.output import claim_directory
from swift_stage2.telemetry.ledger import Entry, ledger_path
from swift_stage2.terminal.parser import CommandParser

B_RATIO = 1.0
"""GRPO trains rollouts at every step, so ours wants to; what it cannot have in time becomes steps of channel A."""
STOCK_STAND_IN = "swift_stage2.bench.stock_stand_in"
_WARMUP_STEPS = 8
_STEPS = 72
_REPEATS = 3
_LATENCY_S = 0.5
_NUM_ROWS = 512

Repetition = dict[LoopArm, LearnerLoop]
Ports = tuple[int, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all arms, prints the tables and writes ``peer.json`` and ``peer.md``.

    Raises:
        UserError: an option is out of range, vLLM is not installed, or the output directory cannot be used.
        ChildFailed: a process did not end well, or the inline run skipped a B step.
    """
    options = _parse(argv)
    require_vllm("ms-swift's rollout client", without_gpu=True)  # it imports it
    directory = claim_directory(options.output, keep=options.keep)
    rows = write_scenes(directory, SceneKind.SHAPES, num_train=_NUM_ROWS, num_held_out=1, seed=0).train
    repetitions: list[Repetition] = []
    with BenchServers(directory / "logs") as servers, ChildRuns() as children:
        ours = start_stand_in(servers, rows, options.latency_s)
        peers = start_stand_in(servers, rows, options.latency_s, STOCK_STAND_IN)
        for number in range(options.repeats):
            loops: Repetition = {}
            for arm in list(LoopArm)[:: 1 if number % 2 == 0 else -1]:
                print(f"[bench] repetition {number + 1} of {options.repeats}: {arm}", flush=True)
                place = directory / f"{number}-{arm.name.lower()}"
                run, ports = (_run_ours, ours) if arm in _OURS else (_run_peer, peers)
                loops[arm] = run(children, arm, place, rows, options.steps, ports)
            repetitions.append(loops)
    facts = {
        "latency_s": options.latency_s,
        "steps": options.steps - _WARMUP_STEPS,
        "b_ratio": B_RATIO,
        "learner_cores": sorted(os.sched_getaffinity(0)),
        "server_cores": sorted(split_cores()[1]),
        "repetitions": [
            {arm.name.lower(): _facts(loop) for arm, loop in each.items()}
            | {f"{arm.name.lower()}_of_bound": shares_of_bound(each, arm) for arm in ASYNCHRONOUS}
            for each in repetitions
        ],
    }
    tables = [loop_table(repetitions), work_table(repetitions), bound_table(repetitions)]
    publish(directory, "peer", facts, tables, notes(options.latency_s))
    return 0


def _facts(loop: LearnerLoop) -> dict[str, Any]:
    return asdict(loop) | {
        "idle_share": loop.idle_share,
        "idle_share_less_queued": loop.idle_share_less_queued,
    }


def loop_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """Idle shares, and what the main threads waited in."""
    columns: tuple[tuple[Callable[[LearnerLoop], float], int, float], ...] = (
        (lambda loop: loop.idle_share, 1, 100.0),
        (lambda loop: loop.idle_share_less_queued, 1, 100.0),
        (lambda loop: loop.in_rollout / loop.num_steps, 0, 1e3),
        (lambda loop: loop.in_push / loop.num_steps, 0, 1e3),
        (lambda loop: loop.seconds / loop.num_steps, 0, 1e3),
        (lambda loop: loop.queued / loop.num_steps, 0, 1e3),
    )
    num_steps = repetitions[0][LoopArm.OURS].num_steps
    return ResultTable(
        f"Learners beside the same stand-in, {num_steps} steps after the warm-up, repetitions: {len(repetitions)}; "
        "median (quartiles)",
        (
            "learner",
            "idle, % of wall time",
            "less waits for a core, %",
            "in rollouts, ms/step",
            "in weights, ms/step",
            "step, ms",
            "of it without a core, ms",
        ),
        _rows(repetitions, columns),
    )


def work_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """How much was trained, and on what."""
    columns: tuple[tuple[Callable[[LearnerLoop], float], int, float], ...] = (
        (lambda loop: loop.steps_per_s, 3, 1.0),
        (lambda loop: loop.num_rollout_steps / loop.num_steps, 1, 100.0),
        (lambda loop: loop.num_completions / max(1, loop.num_rollout_steps), 1, 1.0),
        (lambda loop: loop.completions_per_s, 2, 1.0),
    )
    return ResultTable(
        "What they trained: median (quartiles)",
        (
            "learner",
            "steps/s",
            "steps on rollouts, %",
            "completions in such a step",
            "completions trained, 1/s",
        ),
        _rows(repetitions, columns),
    )


def bound_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """Each asynchronous loop against its own learner without waits for rollouts."""
    rows = []
    for arm in ASYNCHRONOUS:
        bound = Spread.of([1 / each[INLINE_OF[arm]].step_s_without_rollouts for each in repetitions])
        reached = Spread.of([each[arm].steps_per_s for each in repetitions])
        shares = zip(*(shares_of_bound(each, arm) for each in repetitions), strict=True)
        rows.append(
            (str(arm), bound.words(3), reached.words(3), *(Spread.of(each).words(3) for each in shares))
        )
    return ResultTable(
        "Steps/s against the bound without generation, by each learner's own inline run: median (quartiles)",
        ("learner", "bound, steps/s", "reached, steps/s", "of the bound", "less waits for a core"),
        tuple(rows),
    )


def shares_of_bound(each: Repetition, arm: LoopArm) -> tuple[float, float]:
    """Of an asynchronous arm: as the clock on the wall says, and less waits for a core."""
    loop, inline = each[arm], each[INLINE_OF[arm]]
    return share_of_bound(loop, inline), share_of_bound(loop, inline, less_queued=True)


def notes(latency_s: float) -> list[str]:
    """What is alike, and what is not."""
    return [
        "Alike: model, rows, one rank, one torch thread, optimizer, gradient accumulation; a batch of rollouts waits "
        f"{latency_s:g} s on average, drawn by the same class of stand-in and independent of how many there are; "
        "weights really move, over gloo. ms-swift's trainer and client are unmodified but for NCCL, in whose place "
        "gloo sends.",
        f"Not alike: GRPO trains {COMPLETIONS_PER_STEP} completions per step with rewards, advantages and the "
        "log-probabilities of a reference model, several completions of one prompt, padded; ours trains corrected "
        "answers, packed, and proves by checksums what it pushed. So steps/s of the two do not compare; idle shares "
        "do.",
        "GRPO asks once per step, one step ahead, and pushes weights before each time; ours asks further ahead, trains "
        "what is at most 2 versions old, and pushes every 4 steps. That difference in design is what is measured here.",
        f"b_ratio is {B_RATIO:g}, for GRPO trains rollouts at every step. A step for which no packs are ready trains "
        "channel A instead of waiting, which takes another time than a step on packs: read ours' idle share and its "
        "bound beside its steps on rollouts.",
    ]


_OURS = (LoopArm.OURS, LoopArm.OURS_INLINE)


def _rows(
    repetitions: Sequence[Repetition], columns: Sequence[tuple[Callable[[LearnerLoop], float], int, float]]
) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            str(arm),
            *(
                Spread.of([value(each[arm]) for each in repetitions]).words(digits, scale)
                for value, digits, scale in columns
            ),
        )
        for arm in LoopArm
    )


def _run_ours(
    children: ChildRuns, arm: LoopArm, directory: Path, rows: Path, num_steps: int, ports: Ports
) -> LearnerLoop:
    inline = arm is LoopArm.OURS_INLINE
    job = Arm(
        name=arm.name.lower(),
        directory=directory,
        rows=rows,
        num_steps=num_steps,
        b_ratio=B_RATIO,
        ports=ports,
        plugin=PLUGINS / "inline_plugin.py" if inline else None,
    )
    records = run_arm(children, job)
    run = run_of(Mode.INLINE if inline else Mode.ASYNC, records, waits_of(job), _WARMUP_STEPS)
    steps = [record for record in records.of_kind("step") if record["step"] >= _WARMUP_STEPS]
    return loop_of(
        arm,
        records.clock,
        _WARMUP_STEPS,
        in_rollout=run.waited,
        in_push=sum(step["activity_ns"].get("syncing", 0) for step in steps) / 1e9,
        num_rollout_steps=run.num_b_run,
        num_completions=num_trained(ledger_path(directory / "run", 0), _WARMUP_STEPS),
    )


def _run_peer(
    children: ChildRuns, arm: LoopArm, directory: Path, rows: Path, num_steps: int, ports: Ports
) -> LearnerLoop:
    job = GrpoArm(
        name=arm.name.lower(),
        directory=directory,
        rows=rows,
        num_steps=num_steps,
        ports=ports,
        asynchronous=arm is LoopArm.PEER,
    )
    clock = run_grpo(children, job)
    return loop_of(
        arm,
        clock,
        _WARMUP_STEPS,
        in_rollout=since(clock, ROLLOUT_NS, _WARMUP_STEPS),
        in_push=since(clock, PUSH_NS, _WARMUP_STEPS),
        num_rollout_steps=num_steps - _WARMUP_STEPS,
        num_completions=COMPLETIONS_PER_STEP * (num_steps - _WARMUP_STEPS),
    )


def num_trained(ledger: Path, first_step: int) -> int:
    """Completions that steps from ``first_step`` on trained, by the run's ledger."""
    entries = (json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines())
    return sum(
        len(entry["samples"])
        for entry in entries
        if entry["kind"] == Entry.TRAINED and entry["step"] >= first_step
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench peer",
        description="Our learner's loop and ms-swift's own asynchronous GRPO (async_generate) beside the same stand-in "
        "server, asynchronous and inline each: learner idle share, and steps/s against each learner's own bound. Takes "
        "roughly 20 minutes on two cores. Needs vLLM, with whose installation ms-swift's client comes. Exit status 0: "
        "everything was measured.",
    )
    parser.add_argument(
        "--latency-s", type=float, default=_LATENCY_S, help="mean wait of a rollout (default %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=_STEPS,
        help=f"optimizer steps per run, the first {_WARMUP_STEPS} not counted (default %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=_REPEATS, help="repetitions (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-peer"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    refuse_below("repeats", options.repeats, 1, _REPEATS)
    refuse_below("steps", options.steps, 2 * _WARMUP_STEPS, _STEPS)
    if not 0 < options.latency_s <= 10:
        raise UserError(
            f"--latency-s must be above 0 and at most 10, got {options.latency_s}; write {_LATENCY_S}"
        )
    return options
