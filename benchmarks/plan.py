"""``swift-stage2 bench plan``: what it costs to plan a step, against a bare all-reduce of the same size.

As many processes as a job has ranks reserve packs, agree and hand them over through the modules that the learner
uses, in turns with the bare collective. A pair counts as its slowest rank: the step goes on when that has planned.
``torchrun … -m benchmarks.plan DIRECTORY REPEATS LIMIT…`` is one such rank and writes ``DIRECTORY/rankN.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch

from benchmarks.child_runs import ChildRuns, torchrun
from benchmarks.estimates import Spread, exponent_words, pair_ratios, verdict
from benchmarks.results import ResultTable, grouped, publish, say
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.collectives import GlooControlGroup, join_job, leave_job
from swift_stage2.records import Pack
from swift_stage2.scheduling.feasibility_gate import RankFacts, decide, vector_length
from swift_stage2.scheduling.outlook import ProductionPace
from swift_stage2.scheduling.step_plan import Channel

SECONDS_BUDGET = 0.002
SECONDS_BUDGET_RANKS = 2
RATIO_BUDGET = 1.3
NUM_WARMUP = 10
TIMEOUT_S = 120.0
PLAN, OWN, BARE = "plan_s", "own_s", "bare_s"
_PACKS = 4
_START_S = 60.0
_START_PER_RANK_S = 20.0
_SLOWEST_PAIR_S = 1.0
_NUM_SERVERS = 1
_VERSION = 7
_WINDOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCell:
    """All pairs of one number of ranks and one queue limit. Seconds."""

    num_ranks: int
    queue_limit: int
    plan: list[float]
    """Of the slowest rank, pair by pair: reserve, all-reduce, hand over."""
    bare: list[float]
    """Of the slowest rank, pair by pair: the all-reduce alone."""
    own: list[float]
    """Of every rank: the plan without its all-reduce."""

    @property
    def ratios(self) -> list[float]:
        return pair_ratios(self.plan, self.bare)


def run(options: argparse.Namespace, directory: Path) -> int:
    """Measures every number of ranks. Raises ChildFailed when a rank did not end well."""
    cells: list[PlanCell] = []
    with ChildRuns() as children:
        for num_ranks in options.ranks:
            say(f"{num_ranks} ranks")
            cells += _run(children, directory / f"ranks{num_ranks}", num_ranks, options)
    facts = {"num_packs": _PACKS, "cells": [asdict(cell) | {"ratios": cell.ratios} for cell in cells]}
    publish(directory, "plan", facts, plan_table(cells), own_table(cells), rank_table(cells))
    return 0


def _run(children: ChildRuns, directory: Path, num_ranks: int, options: argparse.Namespace) -> list[PlanCell]:
    directory.mkdir()
    rank = ("benchmarks.plan", str(directory), str(options.repeats), *map(str, options.queue_limits))
    num_pairs = options.repeats * len(options.queue_limits)
    children.run(
        f"ranks{num_ranks}",
        torchrun(num_ranks, *rank),
        log_dir=directory / "logs",
        deadline_s=_START_S + _START_PER_RANK_S * num_ranks + _SLOWEST_PAIR_S * num_pairs,
    )
    return cells_of(
        [json.loads((directory / f"rank{number}.json").read_text()) for number in range(num_ranks)]
    )


def cells_of(ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> list[PlanCell]:
    """Makes one cell per queue limit of all ranks' measurements, which are by queue limit and kind."""

    def slowest(limit: str, kind: str) -> list[float]:
        return [max(values) for values in zip(*(rank[limit][kind] for rank in ranks), strict=True)]

    return [
        PlanCell(
            num_ranks=len(ranks),
            queue_limit=int(limit),
            plan=slowest(limit, PLAN),
            bare=slowest(limit, BARE),
            own=[value for rank in ranks for value in rank[limit][OWN]],
        )
        for limit in ranks[0]
    ]


def plan_table(cells: Sequence[PlanCell]) -> ResultTable:

    def budgets(cell: PlanCell) -> str:
        ratio = f"ratio {RATIO_BUDGET}: {verdict(Spread.of(cell.ratios).median <= RATIO_BUDGET)}"
        if cell.num_ranks != SECONDS_BUDGET_RANKS:
            return ratio
        return (
            f"{SECONDS_BUDGET * 1e3:.0f} ms: {verdict(Spread.of(cell.plan).median < SECONDS_BUDGET)}, {ratio}"
        )

    return ResultTable.of(
        f"Planning a step that wants channel B, {len(cells[0].plan)} pairs per row: median (quartiles)",
        cells,
        {
            "ranks": lambda cell: str(cell.num_ranks),
            "queue limit": lambda cell: str(cell.queue_limit),
            "plan, ms": lambda cell: Spread.of(cell.plan).words(3, 1e3),
            "bare all-reduce, ms": lambda cell: Spread.of(cell.bare).words(3, 1e3),
            "ratio": lambda cell: Spread.of(cell.ratios).words(2),
            "own code, µs": lambda cell: Spread.of(cell.own).words(1, 1e6),
            "budget": budgets,
        },
    )


def own_table(cells: Sequence[PlanCell]) -> ResultTable:
    return ResultTable.of(
        "Exponent of own code over the queue limit (log-log least squares of the medians)",
        grouped(cells, lambda cell: cell.num_ranks).values(),
        {
            "ranks": lambda group: str(group[0].num_ranks),
            "queue limits": lambda group: ", ".join(str(cell.queue_limit) for cell in group),
            "exponent": lambda group: _exponent(group, "queue_limit", "own", "one limit only"),
        },
    )


def rank_table(cells: Sequence[PlanCell]) -> ResultTable:
    return ResultTable.of(
        "Exponents over the number of ranks (log-log least squares of the medians)",
        grouped(cells, lambda cell: cell.queue_limit).values(),
        {
            "queue limit": lambda group: str(group[0].queue_limit),
            "ranks": lambda group: ", ".join(str(cell.num_ranks) for cell in group),
            "plan": lambda group: _exponent(group, "num_ranks", "plan", "one number only"),
            "bare all-reduce": lambda group: _exponent(group, "num_ranks", "bare", "one number only"),
            "own code": lambda group: _exponent(group, "num_ranks", "own", "one number only"),
        },
    )


def _exponent(cells: Sequence[PlanCell], size: str, kind: str, otherwise: str) -> str:
    medians = [float(np.median(getattr(cell, kind))) for cell in cells]
    return exponent_words([getattr(cell, size) for cell in cells], medians, otherwise)


# --- one rank ---------------------------------------------------------------------------------------


class PlannedSteps:
    """The learner's way from a queue to packs, step by step: reserve, agree with all ranks, hand over."""

    def __init__(self, control: GlooControlGroup, queue_limit: int) -> None:
        self._control = control
        self._limit = queue_limit
        self._queue = ReadyQueue(queue_limit, _WINDOW)
        self._numbers = count()

    def fill(self) -> None:
        """Packs up to the limit, as a pipeline that is ahead leaves them."""
        while self._queue.depth < self._limit:
            pack = Pack(str(next(self._numbers)), _VERSION, {}, (), 0, 0, 0)
            self._queue.offer(pack, current_version=_VERSION)

    def plan(self) -> tuple[float, float]:
        """Seconds of one step's plan, and of all of it but the all-reduce.

        Raises RuntimeError: the step did not become channel B, so that nothing was measured.
        """
        began = time.perf_counter()
        reservation = self._queue.reserve(_PACKS, current_version=_VERSION)
        facts = RankFacts(
            not_reserved=reservation is None,
            pace=ProductionPace(1.5, 1.5),
            servers_suspect=(False,) * _NUM_SERVERS,
            servers_answer_again=(False,) * _NUM_SERVERS,
        )
        vector = facts.encode()
        asked = time.perf_counter()
        agreed = self._control.reduce_max(vector)
        answered = time.perf_counter()
        plan = decide(agreed, num_servers=_NUM_SERVERS).plan(wants_b=True)
        packs = reservation.take() if reservation is not None and plan.channel is Channel.B else []
        ended = time.perf_counter()
        if len(packs) != _PACKS:
            raise RuntimeError(f"a full queue must give {_PACKS} packs, got {len(packs)}")
        return ended - began, (asked - began) + (ended - answered)


def measure(
    control: GlooControlGroup, repeats: int, limits: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Seconds by queue limit and kind. Who of a pair goes first alternates."""
    torch.set_num_threads(1)
    steps = {limit: PlannedSteps(control, limit) for limit in limits}
    seconds: dict[str, dict[str, list[float]]] = {
        str(limit): {PLAN: [], OWN: [], BARE: []} for limit in limits
    }
    bare = torch.zeros(vector_length(_NUM_SERVERS), dtype=torch.int64)
    for repetition in range(repeats + NUM_WARMUP):
        for limit in limits:
            steps[limit].fill()
            pair: dict[str, float] = {}
            for planned in (True, False) if repetition % 2 == 0 else (False, True):
                control.reduce_max((0,))  # a barrier: what follows must not count how late others are
                if planned:
                    pair[PLAN], pair[OWN] = steps[limit].plan()
                else:
                    began = time.perf_counter()
                    control.max_in_place(bare)
                    pair[BARE] = time.perf_counter() - began
            if repetition >= NUM_WARMUP:
                for kind, value in pair.items():
                    seconds[str(limit)][kind].append(value)
    return seconds


def main(argv: Sequence[str]) -> int:
    directory, repeats, *limits = argv
    join_job(TIMEOUT_S)
    control = GlooControlGroup(TIMEOUT_S)
    seconds = measure(control, int(repeats), [int(limit) for limit in limits])
    path = Path(directory) / f"rank{control.rank}.json"
    path.write_text(json.dumps(seconds) + "\n", encoding="utf-8")
    control.close()
    leave_job()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
