"""``swift-stage2 bench peer``: our learner's loop and ms-swift's own asynchronous GRPO, beside the same stand-in.

Both train the same tiny model on one rank with one torch thread, and both want rollouts for every step. Each also runs
inline, where steps wait for their rollouts: a step's time less its waits bounds what the asynchronous run can reach.
What the two train is not alike, so that idle shares compare, and steps/s only with a learner's own bound. Idle is the
share of wall time in which the main thread, which does all of a step's computing, neither ran on a core nor was ready
to run without one: it waits for rollouts, weights, locks, files.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.child_runs import ChildRuns
from benchmarks.clocks import Clock, since
from benchmarks.cores import split_cores
from benchmarks.learner_job import (
    COMPLETIONS_PER_STEP,
    PUSH_NS,
    ROLLOUT_NS,
    Arm,
    run_arm,
    run_grpo,
    write_rows,
)
from benchmarks.overlap import NUM_WARMUP, Mode, run_of
from benchmarks.results import ResultTable, in_turns, publish, spread_table
from benchmarks.servers import BenchServers, start_stand_in
from benchmarks.stand_in_server import SLOW_FACTOR
from swift_stage2 import config
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.telemetry.ledger import Entry, ledger_path

_PREFETCH = {"queue_limit": 16, "prefetch_target_packs": 16}
"""At 5 steps/s of 2 packs each and a second from a request to its pack, 10 packs are in the making."""


class LoopArm(StrEnum):
    """Whose loop, and whether steps wait for their rollouts."""

    OURS = "ours, asynchronous"
    PEER = "ms-swift GRPO, async_generate"
    OURS_INLINE = "ours, inline"
    PEER_INLINE = "ms-swift GRPO, inline"


ASYNCHRONOUS = (LoopArm.OURS, LoopArm.PEER)
INLINE_OF = {LoopArm.OURS: LoopArm.OURS_INLINE, LoopArm.PEER: LoopArm.PEER_INLINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoop:
    """One run after its warm-up. Seconds are sums over its steps."""

    arm: LoopArm
    num_steps: int
    seconds: float
    on_core: float
    queued: float
    """Ready to run without a core, which other programs had."""
    in_rollout: float
    """Main thread in a rollout call, or waiting for one."""
    in_push: float
    """Main thread in a push of weights or in a sync round."""
    num_rollout_steps: int
    """Steps that trained on rollouts; the others of ours trained channel A."""
    num_completions: int
    server_idle_share: float = 0.0
    """Of the time in which no request ran on a server, by its own clock; the mean over servers. 0 to 1."""

    @classmethod
    def of(cls, arm: LoopArm, clock: Clock, num_warmup: int, **rest: Any) -> LearnerLoop:
        """From a clock's nanoseconds at the end of every step; ``rest`` is what it does not tell."""
        return cls(
            arm=arm,
            num_steps=len(clock["end_ns"]) - num_warmup,
            seconds=since(clock, "end_ns", num_warmup),
            on_core=since(clock, "main_ns", num_warmup),
            queued=since(clock, "queued_ns", num_warmup),
            **rest,
        )

    @property
    def idle_share(self) -> float:
        """0 to 1."""
        return 1 - (self.on_core + self.queued) / self.seconds

    @property
    def idle_share_less_queued(self) -> float:
        """The same of the time in which nobody else had its core: on a shared machine it says more."""
        return 1 - self.on_core / (self.seconds - self.queued)

    @property
    def step_s_without_rollouts(self) -> float:
        """Mean seconds of a step less what it was in rollouts."""
        return (self.seconds - self.in_rollout) / self.num_steps


def share_of_bound(loop: LearnerLoop, inline: LearnerLoop, *, less_queued: bool = False) -> float:
    """Steps/s of ``loop`` over those that the same learner would have if rollouts took no time, by its inline run.

    ``less_queued``: as if nobody had ever waited for a core, which on a shared machine says more.
    """
    bound_s = inline.step_s_without_rollouts - less_queued * inline.queued / inline.num_steps
    step_s = (loop.seconds - less_queued * loop.queued) / loop.num_steps
    return bound_s / step_s


Repetition = dict[LoopArm, LearnerLoop]


def check(options: argparse.Namespace) -> None:
    """ms-swift's client imports vLLM."""
    require_vllm("ms-swift's rollout client", without_gpu=True)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises ChildFailed when a process did not end well, or the inline run skipped a B step."""
    rows = write_rows(directory)
    runs: dict[int, Repetition] = defaultdict(dict)
    with BenchServers(directory / "logs") as servers, ChildRuns() as children:
        latencies = [options.latency_s, *([options.other_latency_s] if options.other_latency_s else [])]
        logs = {
            stock: [directory / f"load-{stock=:d}-{number}.txt" for number in range(len(latencies))]
            for stock in (False, True)
        }
        ports = {
            stock: [
                start_stand_in(
                    servers, rows, latency_s, slow_share=options.slow_share, stock=stock, load_log=log
                )
                for latency_s, log in zip(latencies, logs[stock], strict=True)
            ]
            for stock in logs
        }
        for number, loop in in_turns(LoopArm, options.repeats):
            is_peer = loop in (LoopArm.PEER, LoopArm.PEER_INLINE)
            arm = Arm(
                name=loop.name.lower(),
                directory=directory / f"{number}-{loop.name.lower()}",
                rows=rows,
                num_steps=options.steps,
                ports=ports[is_peer][0],
                more_ports=tuple(ports[is_peer][1:]),
                b_ratio=0.0 if is_peer else options.b_ratio,
                prefetch={**_PREFETCH, "sync_every_steps": options.sync_every_steps},
                sync={"on_pending": options.on_pending},
                mode=config.Mode.INLINE if loop is LoopArm.OURS_INLINE else config.Mode.ASYNC,
            )
            runs[number][loop] = (_run_peer if is_peer else _run_ours)(children, loop, arm, logs[is_peer])
    repetitions = list(runs.values())
    facts = {
        "latencies_s": latencies,
        "slow_share": options.slow_share,
        "steps": options.steps - NUM_WARMUP,
        "b_ratio": options.b_ratio,
        "sync_every_steps": options.sync_every_steps,
        "on_pending": options.on_pending,
        "learner_cores": sorted(os.sched_getaffinity(0)),
        "server_cores": sorted(split_cores()[1]),
        "repetitions": [
            {arm.name.lower(): _facts(loop) for arm, loop in each.items()}
            | {f"{arm.name.lower()}_of_bound": shares_of_bound(each, arm) for arm in ASYNCHRONOUS}
            for each in repetitions
        ],
    }
    tables = [loop_table(repetitions), work_table(repetitions), bound_table(repetitions)]
    publish(
        directory,
        "peer",
        facts,
        *tables,
        *notes(latencies, options.slow_share, options.b_ratio, options.sync_every_steps),
    )
    return 0


def _facts(loop: LearnerLoop) -> dict[str, Any]:
    shares = {"idle_share": loop.idle_share, "idle_share_less_queued": loop.idle_share_less_queued}
    return asdict(loop) | shares


def _by_arm(repetitions: Sequence[Repetition]) -> dict[str, list[LearnerLoop]]:
    return {str(arm): [each[arm] for each in repetitions] for arm in LoopArm}


def loop_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """Idle shares, and what the main threads waited in."""
    num_steps = repetitions[0][LoopArm.OURS].num_steps
    return spread_table(
        f"Learners beside the same stand-in, {num_steps} steps after the warm-up, repetitions: {len(repetitions)}; "
        "median (quartiles)",
        "learner",
        _by_arm(repetitions),
        {
            "idle, % of wall time": (1, lambda loop: 100 * loop.idle_share),
            "less waits for a core, %": (1, lambda loop: 100 * loop.idle_share_less_queued),
            "in rollouts, ms/step": (0, lambda loop: 1e3 * loop.in_rollout / loop.num_steps),
            "in weights, ms/step": (0, lambda loop: 1e3 * loop.in_push / loop.num_steps),
            "step, ms": (0, lambda loop: 1e3 * loop.seconds / loop.num_steps),
            "of it without a core, ms": (0, lambda loop: 1e3 * loop.queued / loop.num_steps),
            "server idle, %": (1, lambda loop: 100 * loop.server_idle_share),
        },
    )


def work_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """How much was trained, and on what."""
    return spread_table(
        "What they trained: median (quartiles)",
        "learner",
        _by_arm(repetitions),
        {
            "steps/s": (3, lambda loop: loop.num_steps / loop.seconds),
            "steps on rollouts, %": (1, lambda loop: 100 * loop.num_rollout_steps / loop.num_steps),
            "completions in such a step": (1, lambda it: it.num_completions / max(1, it.num_rollout_steps)),
            "completions trained, 1/s": (2, lambda loop: loop.num_completions / loop.seconds),
        },
    )


def bound_table(repetitions: Sequence[Repetition]) -> ResultTable:
    """Each asynchronous loop against its own learner without waits for rollouts."""
    return spread_table(
        "Steps/s against the bound without generation, by each learner's own inline run: median (quartiles)",
        "learner",
        {str(arm): [(each, arm) for each in repetitions] for arm in ASYNCHRONOUS},
        {
            "bound, steps/s": (3, lambda it: 1 / it[0][INLINE_OF[it[1]]].step_s_without_rollouts),
            "reached, steps/s": (3, lambda it: it[0][it[1]].num_steps / it[0][it[1]].seconds),
            "of the bound": (3, lambda it: shares_of_bound(*it)[0]),
            "less waits for a core": (3, lambda it: shares_of_bound(*it)[1]),
        },
    )


def shares_of_bound(each: Repetition, arm: LoopArm) -> tuple[float, float]:
    """Of an asynchronous arm: as the clock on the wall says, and less waits for a core."""
    loop, inline = each[arm], each[INLINE_OF[arm]]
    return share_of_bound(loop, inline), share_of_bound(loop, inline, less_queued=True)


def notes(latencies: Sequence[float], slow_share: float, b_ratio: float, sync_every_steps: int) -> list[str]:
    """Sentences tell where the learners are alike and where they are not."""
    waits = " or, on the other server, ".join(f"{each:g}" for each in latencies)
    return [
        "Alike: model, rows, one rank, one torch thread, optimizer, gradient accumulation; every rollout waits "
        f"{waits} s on average, {slow_share:.0%} of them {SLOW_FACTOR:g} times as long, drawn by the same class of "
        "stand-in and independent of how many there are; a batch ends with its slowest; weights really move, over "
        "gloo. ms-swift's trainer and client are unmodified but for NCCL, in whose place gloo sends.",
        f"Not alike: GRPO trains {COMPLETIONS_PER_STEP} completions per step with rewards, advantages and the "
        "log-probabilities of a reference model, several completions of one prompt, padded; ours trains corrected "
        "answers, packed, and proves by checksums what it pushed. So steps/s of the two do not compare; idle shares "
        "do.",
        "GRPO asks once per step, one step ahead, and pushes weights before each time; ours asks further ahead, trains "
        f"what is at most 2 versions old, and pushes every {sync_every_steps} steps. That difference in design is "
        "what is measured here.",
        f"b_ratio is {b_ratio:g}; GRPO trains rollouts at every step. A step for which no packs are ready trains "
        "channel A instead of waiting, which takes another time than a step on packs: read ours' idle share and its "
        "bound beside its steps on rollouts.",
    ]


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
        num_rollout_steps=arm.num_steps - NUM_WARMUP,
        num_completions=COMPLETIONS_PER_STEP * (arm.num_steps - NUM_WARMUP),
        server_idle_share=_mean_idle_share(logs, clock),
    )


def _mean_idle_share(logs: Sequence[Path], clock: Clock) -> float:
    begin_ns, end_ns = clock["end_ns"][NUM_WARMUP - 1], clock["end_ns"][-1]
    return fmean(idle_share_of(log.read_text(encoding="utf-8"), begin_ns, end_ns) for log in logs)


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
