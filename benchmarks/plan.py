"""``swift-stage2 bench plan``: what it costs to plan a step, against a bare all-reduce of the same size.

As many processes as a job has ranks reserve packs, agree and hand them over through the modules that the learner
uses, in turns with the bare collective. A pair counts as its slowest rank: the step goes on when that has planned.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.bench_options import refuse_below
from benchmarks.plan_rank import BARE, OWN, PLAN
from benchmarks.results import ResultTable, publish
from benchmarks.spread import Spread, fit_exponent, verdict
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT
from swift_stage2.errors import UserError
from swift_stage2.output_directory import claim_directory

SECONDS_BUDGET = 0.002
SECONDS_BUDGET_RANKS = 2
RATIO_BUDGET = 1.3
_RANKS = (2, 4, 8, 16)
_LIMITS = (8, 64, 512)
_REPEATS = 200
_PACKS = 4
_START_S = 60.0
_START_PER_RANK_S = 20.0
_SLOWEST_PAIR_S = 1.0


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
        """Plan over bare all-reduce, pair by pair."""
        return [plan / bare for plan, bare in zip(self.plan, self.bare, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every number of ranks, prints the tables and writes ``plan.json`` and ``plan.md``.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
        ChildFailed: a rank did not end well.
    """
    options = _parse(argv)
    directory = claim_directory(options.output, keep=options.keep)
    cells: list[PlanCell] = []
    with ChildRuns() as children:
        for num_ranks in options.ranks:
            print(f"[bench] {num_ranks} ranks", flush=True)
            cells += _run(children, directory / f"ranks{num_ranks}", num_ranks, options)
    facts = {"num_packs": options.packs, "cells": [asdict(cell) | {"ratios": cell.ratios} for cell in cells]}
    publish(directory, "plan", facts, [plan_table(cells), own_table(cells), rank_table(cells)])
    return 0


def _run(children: ChildRuns, directory: Path, num_ranks: int, options: argparse.Namespace) -> list[PlanCell]:
    directory.mkdir()
    limits = [str(limit) for limit in options.queue_limits]
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    )
    rank = ("-m", "benchmarks.plan_rank", str(directory), str(options.repeats), str(options.packs))
    num_pairs = options.repeats * len(limits)
    children.run(
        f"ranks{num_ranks}",
        (*torchrun, *rank, *limits),
        log_dir=directory / "logs",
        deadline_s=_START_S + _START_PER_RANK_S * num_ranks + _SLOWEST_PAIR_S * num_pairs,
        environment=CHILD_ENVIRONMENT,
    )
    ranks = [json.loads((directory / f"rank{number}.json").read_text()) for number in range(num_ranks)]
    return cells_of(ranks)


def cells_of(ranks: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> list[PlanCell]:
    """What every rank measured, by queue limit and kind, as one cell per queue limit."""

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
    """One row per number of ranks and queue limit, with what the budgets say."""
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        plan, ratio = Spread.of(cell.plan), Spread.of(cell.ratios)
        said = [f"ratio {RATIO_BUDGET}: {verdict(ratio.median <= RATIO_BUDGET)}"]
        if cell.num_ranks == SECONDS_BUDGET_RANKS:
            said.insert(0, f"{SECONDS_BUDGET * 1e3:.0f} ms: {verdict(plan.median < SECONDS_BUDGET)}")
        rows.append(
            (
                str(cell.num_ranks),
                str(cell.queue_limit),
                plan.words(3, 1e3),
                Spread.of(cell.bare).words(3, 1e3),
                ratio.words(2),
                Spread.of(cell.own).words(1, 1e6),
                ", ".join(said),
            )
        )
    return ResultTable(
        f"Planning a step that wants channel B, {len(cells[0].plan)} pairs per row: median (quartiles)",
        ("ranks", "queue limit", "plan, ms", "bare all-reduce, ms", "ratio", "own code, µs", "budget"),
        tuple(rows),
    )


def own_table(cells: Sequence[PlanCell]) -> ResultTable:
    """How the time outside the all-reduce grows with the queue."""
    rows = []
    for num_ranks in dict.fromkeys(cell.num_ranks for cell in cells):
        mine = [cell for cell in cells if cell.num_ranks == num_ranks]
        limits = [cell.queue_limit for cell in mine]
        medians = [float(np.median(cell.own)) for cell in mine]
        exponent = f"{fit_exponent(limits, medians):.2f}" if len(set(limits)) > 1 else "one limit only"
        rows.append((str(num_ranks), ", ".join(map(str, limits)), exponent))
    return ResultTable(
        "Exponent of own code over the queue limit (log-log least squares of the medians)",
        ("ranks", "queue limits", "exponent"),
        tuple(rows),
    )


def rank_table(cells: Sequence[PlanCell]) -> ResultTable:
    """How plan, bare all-reduce and own code grow with the number of ranks."""
    rows = []
    for limit in dict.fromkeys(cell.queue_limit for cell in cells):
        mine = [cell for cell in cells if cell.queue_limit == limit]
        ranks = [cell.num_ranks for cell in mine]
        columns = (
            [float(np.median(getattr(cell, kind))) for cell in mine] for kind in ("plan", "bare", "own")
        )
        exponents = (
            f"{fit_exponent(ranks, column):.2f}" if len(ranks) > 1 else "one number only"
            for column in columns
        )
        rows.append((str(limit), ", ".join(map(str, ranks)), *exponents))
    return ResultTable(
        "Exponents over the number of ranks (log-log least squares of the medians)",
        ("queue limit", "ranks", "plan", "bare all-reduce", "own code"),
        tuple(rows),
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench plan",
        description="The cost to plan a step (reserve, agree, hand over) against a bare all-reduce of the same size. "
        "Takes roughly 5 minutes on two cores. Exit status 0: everything was measured.",
    )
    _add_numbers(parser, "--ranks", _RANKS, "numbers of ranks, each at least 2")
    _add_numbers(parser, "--queue-limits", _LIMITS, "packs in the queue, each at least --packs")
    parser.add_argument("--packs", type=int, default=_PACKS, help="packs of a step (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=_REPEATS, help="pairs per cell (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-plan"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    refuse_below("ranks", min(options.ranks), 2, 2)
    refuse_below("packs", options.packs, 1, _PACKS)
    refuse_below("repeats", options.repeats, 2, _REPEATS)
    if min(options.queue_limits) < options.packs:
        raise UserError(
            f"--queue-limits must each be at least --packs={options.packs}, got {min(options.queue_limits)}; "
            f"write {' '.join(map(str, _LIMITS))}"
        )
    return options


def _add_numbers(parser: Any, name: str, default: Sequence[int], words: str) -> None:
    shown = " ".join(map(str, default))
    parser.add_argument(
        name, type=int, nargs="+", default=list(default), metavar="N", help=f"{words} (default {shown})"
    )
