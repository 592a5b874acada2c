"""``swift-stage2 bench peer``: our learner's loop and ms-swift's own asynchronous GRPO, beside the same server.

Both train the same tiny model on one rank with one torch thread, and both want rollouts for every step. Each also runs
inline, where steps wait for their rollouts: a step's time less its waits bounds what the asynchronous run can reach.
With ``--objective grpo`` both train rollouts by one reward, as many of each row. Else what they train is not alike, so
that idle shares compare, and steps/s only with a learner's own bound. Idle is the share of wall time in which the
main thread, which does all of a step's computing, neither ran on a core nor was ready to run without one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.clocks import Clock, since
from benchmarks.learner_job import (
    COMPLETIONS_PER_STEP,
    NUM_WARMUP,
    PUSH_NS,
    ROLLOUT_NS,
    TOKENS,
    Arm,
    run_arm,
    run_grpo,
    write_rows,
)
from benchmarks.overlap import Mode, run_of
from benchmarks.processes import Processes
from benchmarks.results import ResultTable, in_turns, publish, spread_table
from benchmarks.servers import BenchServers, start_stand_in, start_vllm
from swift_stage2 import config
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.telemetry.events import Trained

_FOR_LONG_ANSWERS = {"max_new_tokens": 512, "packing_length": 1024}


class LoopArm(StrEnum):
    """Whose loop, and whether steps wait for their rollouts."""

    OURS = "ours, asynchronous"
    PEER = "ms-swift GRPO, async_generate"
    OURS_INLINE = "ours, inline"
    PEER_INLINE = "ms-swift GRPO, inline"


INLINE_OF = {LoopArm.OURS: LoopArm.OURS_INLINE, LoopArm.PEER: LoopArm.PEER_INLINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoop:
    """One run after its warm-up. Seconds are sums over its steps."""

    num_steps: int
    seconds: float
    on_core: float
    queued: float
    """Ready to run without a core, which other programs had."""
    in_rollout: float
    """Main thread in a rollout call, or waiting for one."""
    in_push: float
    """Main thread in a push of weights or in a sync round."""
    num_wanted: int
    """Steps that were to train on rollouts."""
    num_rollout_steps: int
    """Steps that trained on rollouts; the others of ours trained channel A."""
    num_completions: int
    num_tokens: int
    """Supervised ones, of steps on rollouts."""

    @classmethod
    def of(cls, clock: Clock, num_warmup: int, **rest: Any) -> LearnerLoop:
        """From a clock's nanoseconds at the end of every step; ``rest`` is what it does not tell."""
        return cls(
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
    def completions_per_s(self) -> float:
        return self.num_completions / self.seconds

    @property
    def step_s_without_rollouts(self) -> float:
        """Mean seconds of a step less what it was in rollouts."""
        return (self.seconds - self.in_rollout) / self.num_steps


Repetition = dict[LoopArm, LearnerLoop]


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a repetition: whose loop, how often it takes new weights, and beside which servers."""

    loop: LoopArm
    objective: str
    every: int
    """Steps from one version to the next, of ours; 0 for the peer."""
    slow_share: float = 0.0
    latencies: tuple[float, ...] = (1.0,)
    """One server per entry, whose rollouts wait so many times as long."""

    @property
    def is_peer(self) -> bool:
        return self.loop in (LoopArm.PEER, LoopArm.PEER_INLINE)

    def __str__(self) -> str:
        every = "" if self.is_peer else f", {self.objective}, every {self.every}"
        slow = f", {self.slow_share:.0%} slow" if self.slow_share else ""
        servers = f", servers {' and '.join(f'{each:g}' for each in self.latencies)}"
        return f"{self.loop}{every}{slow}{'' if self.latencies == (1.0,) else servers}"


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The runs of a repetition, those that are compared beside each other."""
    ours = [
        Case(LoopArm.OURS, objective, every, slow, latencies)
        for objective, every, slow in product(options.objective, options.sync_every_steps, options.slow_share)
        for latencies in (((1.0,), (2.0,), (1.0, 2.0)) if options.half_as_fast else ((1.0,),))
    ]
    if options.half_as_fast:
        return ours
    peers = [Case(LoopArm.PEER, "", 0, slow) for slow in options.slow_share]
    if len(ours) > 1:
        return [*ours, *peers]
    return [*ours, *peers, *(replace(case, loop=INLINE_OF[case.loop]) for case in (*ours, *peers))]


def check(options: argparse.Namespace) -> None:
    """Refuses a machine without vLLM, which ms-swift's client imports."""
    require_vllm("ms-swift's rollout client", without_gpu=True)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises ChildFailed when a process did not end well, or the inline run skipped a B step."""
    rows = write_rows(directory)
    runs: dict[int, dict[Case, LearnerLoop]] = defaultdict(dict)
    cases = cases_of(options)
    with BenchServers(directory / "logs") as servers:
        wanted = {(case.is_peer, case.slow_share, each) for case in cases for each in case.latencies}
        ports = {
            (stock, share, latency): start_vllm(servers, stock=stock, slow_share=share)
            if options.server == "vllm"
            else start_stand_in(servers, rows, options.latency_s * latency, slow_share=share, stock=stock)
            for stock, share, latency in sorted(wanted)
        }
        for number, case in in_turns(cases, options.repeats):
            name = f"{number}-{cases.index(case)}-{case.loop.name.lower()}"
            first, *others = (ports[case.is_peer, case.slow_share, latency] for latency in case.latencies)
            arm = Arm(
                name=name,
                directory=directory / name,
                rows=rows,
                num_steps=options.steps,
                ports=first,
                more_ports=tuple(others),
                b_ratio=0.0 if case.is_peer else options.b_ratio,
                prefetch={"sync_every_steps": case.every, "queue_limit": None, "prefetch_target_packs": None},
                mode=config.Mode.INLINE if case.loop is LoopArm.OURS_INLINE else config.Mode.ASYNC,
                objective=config.Objective(case.objective or config.Objective.GRPO),
                max_inflight=options.max_inflight,
                **(_FOR_LONG_ANSWERS if options.server == "vllm" else {}),
            )
            runs[number][case] = (_run_peer if case.is_peer else _run_ours)(servers, case.loop, arm)
    publish(directory, "peer", *tables(cases, list(runs.values())), note(options))
    return 0


def _run_ours(processes: Processes, loop: LoopArm, arm: Arm) -> LearnerLoop:
    records = run_arm(processes, arm)
    run = run_of(Mode.INLINE if loop is LoopArm.OURS_INLINE else Mode.ASYNC, records, NUM_WARMUP)
    steps = [step for number, step in records.events.steps.items() if number >= NUM_WARMUP]
    return LearnerLoop.of(
        records.clock,
        NUM_WARMUP,
        in_rollout=run.waited,
        in_push=sum(step.activity_ns.get("syncing", 0) for step in steps) / 1e9,
        num_wanted=run.num_b_wanted,
        num_rollout_steps=run.num_b_run,
        num_completions=sum(
            len(each.samples) for each in records.events.of(Trained) if each.step >= NUM_WARMUP
        ),
        num_tokens=sum(step.num_supervised_tokens for step in steps),
    )


def _run_peer(processes: Processes, loop: LoopArm, arm: Arm) -> LearnerLoop:
    clock = run_grpo(processes, arm, asynchronous=loop is LoopArm.PEER)
    num_steps = len(clock["end_ns"]) - NUM_WARMUP
    return LearnerLoop.of(
        clock,
        NUM_WARMUP,
        in_rollout=since(clock, ROLLOUT_NS, NUM_WARMUP),
        in_push=since(clock, PUSH_NS, NUM_WARMUP),
        num_wanted=num_steps,
        num_rollout_steps=num_steps,
        num_completions=COMPLETIONS_PER_STEP * num_steps,
        num_tokens=clock[TOKENS][-1] - clock[TOKENS][NUM_WARMUP - 1],
    )


def share_of_bound(each: Repetition, arm: LoopArm, *, less_queued: bool = False) -> float:
    """Steps/s of an arm over those that the same learner would have if rollouts took no time, by its inline run.

    ``less_queued``: as if nobody had ever waited for a core, which on a shared machine says more.
    """
    loop, inline = each[arm], each[INLINE_OF[arm]]
    bound_s = inline.step_s_without_rollouts - less_queued * inline.queued / inline.num_steps
    return bound_s * loop.num_steps / (loop.seconds - less_queued * loop.queued)


def tables(cases: Sequence[Case], repetitions: Sequence[Mapping[Case, LearnerLoop]]) -> list[ResultTable]:
    """Waits and work of the main threads; and how much of each learner's own bound that is, where inline runs say."""
    num_steps = repetitions[0][cases[0]].num_steps
    loops = spread_table(
        f"Learners beside the same kind of server, {num_steps} steps after the warm-up: median (quartiles)",
        "learner",
        {str(case): [(each, case) for each in repetitions] for case in cases},
        {
            "completions trained, 1/s": (2, lambda it: it[0][it[1]].completions_per_s),
            "of the same without slow ones": (
                3,
                lambda it: (
                    it[0][it[1]].completions_per_s
                    / it[0].get(replace(it[1], slow_share=0.0), it[0][it[1]]).completions_per_s
                ),
            ),
            "wanted steps on rollouts, %": (
                1,
                lambda it: 100 * it[0][it[1]].num_rollout_steps / it[0][it[1]].num_wanted,
            ),
            "idle, % of wall time": (1, lambda it: 100 * it[0][it[1]].idle_share),
            "in rollouts, ms/step": (0, lambda it: 1e3 * it[0][it[1]].in_rollout / num_steps),
            "in weights, ms/step": (0, lambda it: 1e3 * it[0][it[1]].in_push / num_steps),
            "step, ms": (0, lambda it: 1e3 * it[0][it[1]].seconds / num_steps),
            "of it without a core, ms": (0, lambda it: 1e3 * it[0][it[1]].queued / num_steps),
            "supervised tokens, 1/s": (0, lambda it: it[0][it[1]].num_tokens / it[0][it[1]].seconds),
        },
    )
    if not any(case.loop is LoopArm.OURS_INLINE for case in cases):
        return [loops]
    alike = [{case.loop: loop for case, loop in each.items()} for each in repetitions]
    bound = spread_table(
        "Steps/s against the bound without generation, by each learner's own inline run: median (quartiles)",
        "learner",
        {str(arm): [(each, arm) for each in alike] for arm in INLINE_OF},
        {
            "bound, steps/s": (3, lambda it: 1 / it[0][INLINE_OF[it[1]]].step_s_without_rollouts),
            "reached, steps/s": (3, lambda it: it[0][it[1]].num_steps / it[0][it[1]].seconds),
            "of the bound": (3, lambda it: share_of_bound(*it)),
            "less waits for a core": (3, lambda it: share_of_bound(*it, less_queued=True)),
        },
    )
    return [loops, bound]


def note(options: argparse.Namespace) -> str:
    return (
        f"Every rollout waits {options.latency_s:g} s on average, slow ones ten times as long. Ours asks further ahead "
        "than GRPO's one step. One without ready packs trains channel A: read its idle share beside its steps on "
        "rollouts."
    )
