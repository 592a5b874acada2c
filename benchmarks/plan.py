"""``swift-stage2 bench plan``: what it costs to plan a step, against a bare all-reduce of the same size.

As many processes as a job has ranks reserve packs, agree and hand them over through the modules that the learner
uses, in turns with the bare collective. A pair counts as its slowest rank: the step goes on when that has planned.
``torchrun … -m benchmarks.plan DIRECTORY REPEATS`` is one such rank and writes ``DIRECTORY/rankN.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.estimates import Spread, pair_ratios, verdict
from benchmarks.processes import Processes, torchrun
from benchmarks.results import ResultTable, publish
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.collectives import GlooControlGroup, join_job, leave_job
from swift_stage2.records import Pack
from swift_stage2.scheduling.feasibility_gate import RankFacts, decide
from swift_stage2.scheduling.step_plan import Channel

SECONDS_BUDGET = 0.002
SECONDS_BUDGET_RANKS = 2
RATIO_BUDGET = 1.3
NUM_WARMUP = 10
TIMEOUT_S = 120.0
PLAN, BARE = "plan_s", "bare_s"
_PACKS = 4
_QUEUE_LIMIT = 64
_START_S = 60.0
_START_PER_RANK_S = 20.0
_SLOWEST_PAIR_S = 1.0
_NUM_SERVERS = 1
_VERSION = 7
_FACTS = RankFacts(
    servers_proven=(_VERSION,) * _NUM_SERVERS,
    servers_suspect=(False,) * _NUM_SERVERS,
    servers_closed=(False,) * _NUM_SERVERS,
    servers_busy=(False,) * _NUM_SERVERS,
)
_WINDOW = 2

Seconds = Mapping[str, Sequence[float]]
"""By kind, pair by pair."""


def run(options: argparse.Namespace, directory: Path) -> int:
    """Measures every number of ranks. Raises ChildFailed when a rank did not end well."""
    found: dict[int, Seconds] = {}
    with Processes(directory / "logs") as processes:
        for num_ranks in options.ranks:
            place = directory / f"ranks{num_ranks}"
            place.mkdir()
            processes.run(
                place.name,
                torchrun(num_ranks, "benchmarks.plan", str(place), str(options.repeats)),
                deadline_s=_START_S + _START_PER_RANK_S * num_ranks + _SLOWEST_PAIR_S * options.repeats,
            )
            found[num_ranks] = slowest(
                [json.loads((place / f"rank{number}.json").read_text()) for number in range(num_ranks)]
            )
    publish(directory, "plan", plan_table(found))
    return 0


def slowest(ranks: Sequence[Seconds]) -> Seconds:
    """Of every pair the rank that took longest, by kind."""
    return {
        kind: [max(values) for values in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in (PLAN, BARE)
    }


def plan_table(found: Mapping[int, Seconds]) -> ResultTable:
    """One row per number of ranks."""

    def budgets(num_ranks: int) -> str:
        ratio = Spread.of(pair_ratios(found[num_ranks][PLAN], found[num_ranks][BARE])).median
        judged = f"ratio {RATIO_BUDGET}: {verdict(ratio <= RATIO_BUDGET)}"
        if num_ranks != SECONDS_BUDGET_RANKS:
            return judged
        seconds = Spread.of(found[num_ranks][PLAN]).median
        return f"{SECONDS_BUDGET * 1e3:.0f} ms: {verdict(seconds < SECONDS_BUDGET)}, {judged}"

    return ResultTable.of(
        "Planning a step that wants channel B: median (quartiles)",
        found,
        {
            "ranks": str,
            "plan, ms": lambda ranks: Spread.of(found[ranks][PLAN]).words(3, 1e3),
            "bare all-reduce, ms": lambda ranks: Spread.of(found[ranks][BARE]).words(3, 1e3),
            "ratio": lambda ranks: Spread.of(pair_ratios(found[ranks][PLAN], found[ranks][BARE])).words(2),
            "budget": budgets,
        },
    )


def plan_step(queue: ReadyQueue, control: GlooControlGroup) -> None:
    """The learner's way from a queue to packs: reserve, agree with all ranks, hand over.

    Raises RuntimeError: the step did not become channel B, so that nothing was measured.
    """
    reservation = queue.reserve(_PACKS, current_version=_VERSION)
    agreed = control.reduce_max(replace(_FACTS, not_reserved=reservation is None).encode())
    plan = decide(agreed, num_servers=_NUM_SERVERS).plan(wants_b=True)
    packs = reservation.take() if reservation is not None and plan.channel is Channel.B else []
    if len(packs) != _PACKS:
        raise RuntimeError(f"a full queue must give {_PACKS} packs, got {len(packs)}")


def measure(control: GlooControlGroup, repeats: int) -> dict[str, list[float]]:
    """Seconds by kind. Who of a pair goes first alternates."""
    torch.set_num_threads(1)
    queue = ReadyQueue(_QUEUE_LIMIT, _WINDOW)
    bare = torch.zeros(len(_FACTS.encode()), dtype=torch.int64)
    works = {PLAN: lambda: plan_step(queue, control), BARE: lambda: control.max_in_place(bare)}
    seconds: dict[str, list[float]] = {PLAN: [], BARE: []}
    for repetition in range(repeats + NUM_WARMUP):
        while queue.depth < _QUEUE_LIMIT:  # as a pipeline that is ahead leaves them
            queue.offer(Pack(str(repetition), _VERSION, {}, (), 0, 0, 0), current_version=_VERSION)
        for kind in (PLAN, BARE) if repetition % 2 == 0 else (BARE, PLAN):
            control.reduce_max((0,))  # a barrier: what follows must not count how late others are
            began = time.perf_counter()
            works[kind]()
            if repetition >= NUM_WARMUP:
                seconds[kind].append(time.perf_counter() - began)
    return seconds


def main(argv: Sequence[str]) -> int:
    directory, repeats = argv
    join_job(TIMEOUT_S)
    control = GlooControlGroup(TIMEOUT_S)
    seconds = measure(control, int(repeats))
    path = Path(directory) / f"rank{control.rank}.json"
    path.write_text(json.dumps(seconds) + "\n", encoding="utf-8")
    control.close()
    leave_job()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
