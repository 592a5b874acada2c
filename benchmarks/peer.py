"""``swift-stage2 bench peer``: our learner's loop and ms-swift's own asynchronous GRPO, beside the same server.

Both train the same tiny model on one rank with one torch thread, and both want rollouts for every step. Each also runs
inline, where steps wait for their rollouts: a step's time less its waits bounds what the asynchronous run can reach.
With ``--objective grpo`` both train rollouts by one reward, as many of each row. Else what they train is not alike, so
that idle shares compare, and steps/s only with a learner's own bound. Idle is the share of wall time in which the
main thread, which does all of a step's computing, neither ran on a core nor was ready to run without one: it waits for
rollouts, weights, locks, files. With ``--server vllm`` rollouts are the model's own, and checkpoints are scored.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.benches import STAND_IN
from benchmarks.child_runs import ChildRuns, score
from benchmarks.clocks import Clock, since
from benchmarks.cores import split_cores, started_on
from benchmarks.learner_job import (
    COMPLETIONS_PER_STEP,
    PUSH_NS,
    ROLLOUT_NS,
    TOKENS,
    Arm,
    run_arm,
    run_grpo,
    write_rows,
)
from benchmarks.learner_loops import (
    ASYNCHRONOUS,
    LearnerLoop,
    LoopArm,
    Repetition,
    bound_table,
    loop_table,
    notes,
    score_table,
    shares_of_bound,
    work_table,
)
from benchmarks.learning import NUM_HELD_OUT
from benchmarks.overlap import NUM_WARMUP, Mode, run_of
from benchmarks.results import in_turns, publish, say
from benchmarks.servers import BenchServers, ServerKind, start_stand_in
from swift_stage2 import config
from swift_stage2.demo.demo_config import STAGE1
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.errors import UserError
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.telemetry.ledger import Entry, ledger_path

_PREFETCH = {"queue_limit": 16, "prefetch_target_packs": 16}
"""At 5 steps/s of 2 packs each and a second from a request to its pack, 10 packs are in the making."""


def check(options: argparse.Namespace) -> None:
    """Refuses waits that only the stand-in has, and a machine without vLLM, which ms-swift's client imports."""
    if options.server != STAND_IN and (options.slow_share or options.other_latency_s):
        raise UserError(
            f"--slow-share and --other-latency-s are the stand-in's, got --server {options.server}; remove them"
        )
    require_vllm("ms-swift's rollout client", without_gpu=True)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises ChildFailed when a process did not end well, or the inline run skipped a B step."""
    generates = options.server != STAND_IN
    rows = write_rows(directory, NUM_HELD_OUT if generates else 1)
    latencies = [options.latency_s, *([options.other_latency_s] if options.other_latency_s else [])]
    logs = {
        stock: []
        if generates
        else [directory / f"load-{stock:d}-{each}.txt" for each in range(len(latencies))]
        for stock in (False, True)
    }
    runs: dict[int, Repetition] = defaultdict(dict)
    with BenchServers(directory / "logs") as servers, ChildRuns() as children, ExitStack() as stack:
        if generates:
            with started_on(split_cores()[1]):
                kinds = {False: ServerKind.VLLM, True: ServerKind.STOCK}
                ports = {stock: [servers.start(kind).ports] for stock, kind in kinds.items()}
            stack.enter_context(started_on(split_cores()[0]))
        else:
            ports = {
                stock: [
                    start_stand_in(
                        servers, rows, latency_s, slow_share=options.slow_share, stock=stock, load_log=log
                    )
                    for latency_s, log in zip(latencies, logs[stock], strict=True)
                ]
                for stock in logs
            }
        learner_cores = sorted(os.sched_getaffinity(0))
        for number, loop in in_turns(LoopArm, options.repeats):
            is_peer = loop in (LoopArm.PEER, LoopArm.PEER_INLINE)
            arm = Arm(
                name=loop.name.lower(),
                directory=_place(directory, number, loop),
                rows=rows,
                num_steps=options.steps,
                ports=ports[is_peer][0],
                more_ports=tuple(ports[is_peer][1:]),
                b_ratio=0.0 if is_peer else options.b_ratio,
                prefetch={**_PREFETCH, "sync_every_steps": options.sync_every_steps},
                sync={"on_pending": options.on_pending},
                mode=config.Mode.INLINE if loop is LoopArm.OURS_INLINE else config.Mode.ASYNC,
                objective=config.Objective(options.objective),
                seconds=options.seconds,
                saves=generates,
            )
            runs[number][loop] = (_run_peer if is_peer else _run_ours)(children, loop, arm, logs[is_peer])
    repetitions = list(runs.values())
    scores = _score(directory, rows, repetitions) if generates else []
    asked = ("server", "objective", "seconds", "slow_share", "b_ratio", "sync_every_steps", "on_pending")
    facts = {
        **{name: getattr(options, name) for name in asked},
        "latencies_s": latencies,
        "steps": options.steps - NUM_WARMUP,
        "learner_cores": learner_cores,
        "server_cores": sorted(split_cores()[1]),
        "repetitions": [
            {
                arm.name.lower(): asdict(loop)
                | {name: getattr(loop, name) for name in ("idle_share", "idle_share_less_queued")}
                for arm, loop in each.items()
            }
            | {f"{arm.name.lower()}_of_bound": shares_of_bound(each, arm) for arm in ASYNCHRONOUS}
            for each in repetitions
        ],
        "scores": [asdict(score) for score in scores],
    }
    tables = [
        loop_table(repetitions, reads_servers=not generates),
        work_table(repetitions),
        bound_table(repetitions),
    ]
    tables += [score_table(repetitions, scores)] if scores else []
    publish(directory, "peer", facts, *tables, *notes(options, latencies))
    return 0


def _place(directory: Path, number: int, loop: LoopArm) -> Path:
    return directory / f"{number}-{loop.name.lower()}"


def _score(directory: Path, rows: Path, repetitions: Sequence[Repetition]) -> Sequence[DetectionScore]:
    """Stage 1's, then of every repetition those of all arms."""
    say("scoring every checkpoint on the same held-out scenes")
    places = [_place(directory, number, loop) for number in range(len(repetitions)) for loop in LoopArm]
    checkpoints = [path for place in places for path in (place / "run").glob("checkpoint-*")]
    held_out = rows.parent.parent / "held_out" / rows.name
    with ChildRuns() as children:
        return score(children, held_out, directory / "scores.json", [STAGE1, *checkpoints])


def _run_ours(children: ChildRuns, loop: LoopArm, arm: Arm, logs: Sequence[Path]) -> LearnerLoop:
    records = run_arm(children, arm)
    run = run_of(Mode.INLINE if loop is LoopArm.OURS_INLINE else Mode.ASYNC, records, NUM_WARMUP)
    steps = [record for record in records.of_kind("step") if record["step"] >= NUM_WARMUP]
    return LearnerLoop.of(
        loop,
        records.clock,
        NUM_WARMUP,
        in_rollout=run.waited,
        in_push=sum(step["activity_ns"].get("syncing", 0) for step in steps) / 1e9,
        num_rollout_steps=run.num_b_run,
        num_completions=num_trained(ledger_path(arm.directory / "run", 0), NUM_WARMUP),
        num_tokens=sum(step["num_supervised_tokens"] for step in steps),
        num_a_steps=sum(step["channel"] == "A" for step in records.of_kind("step")),
        server_idle_share=_mean_idle_share(logs, records.clock),
    )


def _run_peer(children: ChildRuns, loop: LoopArm, arm: Arm, logs: Sequence[Path]) -> LearnerLoop:
    clock = run_grpo(children, arm, asynchronous=loop is LoopArm.PEER)
    return LearnerLoop.of(
        loop,
        clock,
        NUM_WARMUP,
        in_rollout=since(clock, ROLLOUT_NS, NUM_WARMUP),
        in_push=since(clock, PUSH_NS, NUM_WARMUP),
        num_rollout_steps=len(clock["end_ns"]) - NUM_WARMUP,
        num_completions=COMPLETIONS_PER_STEP * (len(clock["end_ns"]) - NUM_WARMUP),
        num_tokens=clock[TOKENS][-1] - clock[TOKENS][NUM_WARMUP - 1],
        num_a_steps=0,
        server_idle_share=_mean_idle_share(logs, clock),
    )


def _mean_idle_share(logs: Sequence[Path], clock: Clock) -> float:
    begin_ns, end_ns = clock["end_ns"][NUM_WARMUP - 1], clock["end_ns"][-1]
    shares = [idle_share_of(log.read_text(encoding="utf-8"), begin_ns, end_ns) for log in logs]
    return fmean(shares) if shares else 0.0


def idle_share_of(load_log: str, begin_ns: int, end_ns: int) -> float:
    """Share of an interval in which no request ran; ``load_log`` as ``StandInEngine.load_log``."""
    changes = [(int(at), int(load)) for at, load in map(str.split, load_log.splitlines())]
    idle_ns = 0
    for (at, load), (until, _) in pairwise([(0, 0), *changes, (end_ns, 0)]):
        if load == 0:
            idle_ns += max(0, min(until, end_ns) - max(at, begin_ns))
    return idle_ns / (end_ns - begin_ns)


def num_trained(ledger: Path, first_step: int) -> int:
    """Completions that steps from ``first_step`` on trained, by the run's ledger."""
    entries = (json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines())
    return sum(
        len(entry["samples"])
        for entry in entries
        if entry["kind"] == Entry.TRAINED and entry["step"] >= first_step
    )
