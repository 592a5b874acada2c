"""``swift-stage2 bench preprocess``: samples/s of every stage between a rollout and a pack, on one core.

Three questions: how each stage grows with the number of objects, and of samples in a pack; what encode and pack add to
the template that they call; what the rules of the match add to IoU, top-k and assignment on the same boxes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child_runs import ChildRuns
from benchmarks.estimates import Spread, exponent_words, pair_ratios, verdict
from benchmarks.results import ResultTable, publish

RATE_BUDGET = 240.0
RATE_BUDGET_OBJECTS = 20
RATE_BUDGET_STAGE = "parse+match+target"
TEMPLATE_BUDGET = 1.1
MATCH_BUDGET = 1.5
_LARGE = 50
_START_S = 120.0
_SLOWEST_REPETITION_S = 30.0

TEMPLATE = "Encode + pack against the bare template.encode + data collator, one pack of 4 samples: median (quartiles)"
MATCH = "Match of {0} × {0} boxes against bare IoU + top-k + scipy assignment: median (quartiles)"
Seconds = Mapping[str, Mapping[str, Sequence[float]]]


def run(options: argparse.Namespace, directory: Path) -> int:
    """Measures in a process of its own. Raises ChildFailed when that did not end well."""
    settings, out = directory / "settings.json", directory / "measured.json"
    asked = {name: getattr(options, name) for name in ("objects", "samples", "crowd", "repeats")}
    settings.write_text(json.dumps(asked | {"sample_objects": RATE_BUDGET_OBJECTS}), encoding="utf-8")
    with ChildRuns() as children:
        children.run(
            "stages",
            (sys.executable, "-m", "benchmarks.preprocess_stages", str(settings), str(out)),
            log_dir=directory / "logs",
            deadline_s=_START_S + _SLOWEST_REPETITION_S * options.repeats,
        )
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    tables = [
        stage_table(found["stages"]),
        pack_table(found["packs"]),
        template_table(found["pairs"]),
        match_table(found["matches"], options.crowd),
    ]
    publish(directory, "preprocess", found, *tables, *notes(found["stages"]))
    return 0


def stage_table(stages: Seconds) -> ResultTable:
    return _growth_table(
        "Samples per processor second of one thread by number of objects: median; exponent of the seconds over the "
        f"count, of all counts and from {_LARGE} on",
        stages,
        _rate,
        {"exponent": 0, f"from {_LARGE}": _LARGE},
    )


def pack_table(packs: Seconds) -> ResultTable:
    return _growth_table(
        f"Milliseconds of one pack by its number of samples, {RATE_BUDGET_OBJECTS} objects in each: median; exponent "
        "over the number",
        packs,
        lambda seconds: f"{seconds * 1e3:.2f}",
        {"exponent": 0},
    )


def _growth_table(
    title: str, measured: Seconds, cell: Callable[[float], str], exponents: Mapping[str, int]
) -> ResultTable:
    """The median of every stage by size, and how it grows with sizes from the least on that each exponent has."""
    sizes = sorted(map(int, measured))
    rows = []
    for stage in measured[str(sizes[0])]:
        medians = {size: float(np.median(measured[str(size)][stage])) for size in sizes}
        growth = ({size: medians[size] for size in sizes if size >= least} for least in exponents.values())
        found = (exponent_words(list(each), list(each.values()), "–") for each in growth)
        rows.append((stage, *map(cell, medians.values()), *found))
    return ResultTable(title, ("stage", *map(str, sizes), *exponents), rows)


def template_table(pairs: Seconds) -> ResultTable:
    in_order = {count: pairs[count] for count in sorted(pairs, key=int)}
    return _ratio_table(TEMPLATE, ("objects", "ours, ms", "bare, ms"), in_order, TEMPLATE_BUDGET)


def match_table(matches: Seconds, num_objects: int) -> ResultTable:
    return _ratio_table(
        MATCH.format(num_objects), ("answer", "match, ms", "bare parts, ms"), matches, MATCH_BUDGET
    )


def _ratio_table(title: str, columns: tuple[str, str, str], pairs: Seconds, budget: float) -> ResultTable:
    rows = []
    for name, pair in pairs.items():
        ratio = Spread.of(pair_ratios(pair["ours"], pair["bare"]))
        ours, bare = (Spread.of(pair[which]).words(2, 1e3) for which in ("ours", "bare"))
        rows.append((name, ours, bare, ratio.words(3), verdict(ratio.median <= budget)))
    return ResultTable(title, (*columns, "ratio", f"budget {budget}"), rows)


def notes(stages: Seconds) -> list[str]:
    """One sentence compares the rate with its budget, where its object count was measured."""
    measured = stages.get(str(RATE_BUDGET_OBJECTS))
    if measured is None:
        return []
    rates = Spread.of([1 / seconds for seconds in measured[RATE_BUDGET_STAGE]])
    return [
        f"{RATE_BUDGET_STAGE} at {RATE_BUDGET_OBJECTS} objects: {rates.words(0)} samples/s, budget at least "
        f"{RATE_BUDGET:.0f}: {verdict(rates.median >= RATE_BUDGET)}."
    ]


def _rate(seconds: float) -> str:
    rate = 1 / seconds
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
