"""``swift-stage2 bench preprocess``: samples/s of every stage between a rollout and a pack, on one core.

Three questions: how each stage grows with the number of objects, and of samples in a pack; what encode and pack add to
the template that they call; what the rules of the match add to IoU, top-k and assignment on the same boxes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.bench_options import refuse_below
from benchmarks.results import ResultTable, publish
from benchmarks.spread import Spread, fit_exponent, verdict
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT
from swift_stage2.output_directory import claim_directory

RATE_BUDGET = 240.0
RATE_BUDGET_OBJECTS = 20
RATE_BUDGET_STAGE = "parse+match+target"
TEMPLATE_BUDGET = 1.1
MATCH_BUDGET = 1.5
_OBJECTS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_SAMPLES = (1, 2, 4, 8, 16, 32)
_CROWD = 500
_REPEATS = 30
_LARGE = 50
_START_S = 120.0
_SLOWEST_REPETITION_S = 30.0

Seconds = Mapping[str, Mapping[str, Sequence[float]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures in a process of its own, prints the tables and writes ``preprocess.json`` and ``preprocess.md``.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
        ChildFailed: the measured process did not end well.
    """
    options = _parse(argv)
    directory = claim_directory(options.output, keep=options.keep)
    settings, out = directory / "settings.json", directory / "measured.json"
    settings.write_text(
        json.dumps(
            {
                "objects": options.objects,
                "samples": options.samples,
                "sample_objects": RATE_BUDGET_OBJECTS,
                "crowd": options.crowd,
                "repeats": options.repeats,
            }
        ),
        encoding="utf-8",
    )
    with ChildRuns() as children:
        children.run(
            "stages",
            (sys.executable, "-m", "benchmarks.preprocess_stages", str(settings), str(out)),
            log_dir=directory / "logs",
            deadline_s=_START_S + _SLOWEST_REPETITION_S * options.repeats,
            environment=CHILD_ENVIRONMENT,
        )
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    tables = [
        stage_table(found["stages"]),
        pack_table(found["packs"]),
        template_table(found["pairs"]),
        match_table(found["matches"], options.crowd),
    ]
    publish(directory, "preprocess", found, tables, notes(found["stages"]))
    return 0


def stage_table(stages: Seconds) -> ResultTable:
    """Samples/s by stage and object count, and how the seconds grow with the count."""
    counts = sorted(int(count) for count in stages)
    names = list(stages[str(counts[0])])
    rows = []
    for name in names:
        medians = [float(np.median(stages[str(count)][name])) for count in counts]
        large = [(count, value) for count, value in zip(counts, medians, strict=True) if count >= _LARGE]
        rows.append(
            (
                name,
                *(_rate(stages[str(count)][name]) for count in counts),
                _exponent(counts, medians),
                _exponent([count for count, _ in large], [value for _, value in large]),
            )
        )
    return ResultTable(
        "Samples per processor second of one thread by number of objects: median; exponent of the seconds over the "
        f"count, of all counts and from {_LARGE} on",
        ("stage", *map(str, counts), "exponent", f"from {_LARGE}"),
        tuple(rows),
    )


def pack_table(packs: Seconds) -> ResultTable:
    """Milliseconds of a whole pack by stage and number of samples, and how they grow with it."""
    sizes = sorted(int(size) for size in packs)
    rows = []
    for name in packs[str(sizes[0])]:
        medians = [float(np.median(packs[str(size)][name])) for size in sizes]
        rows.append((name, *(f"{median * 1e3:.2f}" for median in medians), _exponent(sizes, medians)))
    return ResultTable(
        f"Milliseconds of one pack by its number of samples, {RATE_BUDGET_OBJECTS} objects in each: median; exponent "
        "over the number",
        ("stage", *map(str, sizes), "exponent"),
        tuple(rows),
    )


def template_table(pairs: Seconds) -> ResultTable:
    """Encode and pack against the bare template, pair by pair."""
    rows = [
        (count, *_compared(pair, 1e3, 2), _said(pair, TEMPLATE_BUDGET))
        for count, pair in sorted(pairs.items(), key=lambda item: int(item[0]))
    ]
    return ResultTable(
        "Encode + pack against the bare template.encode + data collator, one pack of 4 samples: median (quartiles)",
        ("objects", "ours, ms", "bare, ms", "ratio", f"budget {TEMPLATE_BUDGET}"),
        tuple(rows),
    )


def match_table(matches: Seconds, num_objects: int) -> ResultTable:
    """The match against its bare parts, pair by pair, by kind of answer."""
    rows = [(kind, *_compared(pair, 1e3, 2), _said(pair, MATCH_BUDGET)) for kind, pair in matches.items()]
    return ResultTable(
        f"Match of {num_objects} × {num_objects} boxes against bare IoU + top-k + scipy assignment: median (quartiles)",
        ("answer", "match, ms", "bare parts, ms", "ratio", f"budget {MATCH_BUDGET}"),
        tuple(rows),
    )


def notes(stages: Seconds) -> list[str]:
    """What the rate's budget says, where its object count was measured."""
    measured = stages.get(str(RATE_BUDGET_OBJECTS))
    if measured is None:
        return []
    rates = Spread.of([1 / seconds for seconds in measured[RATE_BUDGET_STAGE]])
    return [
        f"{RATE_BUDGET_STAGE} at {RATE_BUDGET_OBJECTS} objects: {rates.words(0)} samples/s, budget at least "
        f"{RATE_BUDGET:.0f}: {verdict(rates.median >= RATE_BUDGET)}."
    ]


def _rate(seconds: Sequence[float]) -> str:
    rate = 1 / float(np.median(seconds))
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _exponent(counts: Sequence[int], seconds: Sequence[float]) -> str:
    return f"{fit_exponent(counts, seconds):.2f}" if len(set(counts)) > 1 else "–"


def _ratios(pair: Mapping[str, Sequence[float]]) -> list[float]:
    return [ours / bare for ours, bare in zip(pair["ours"], pair["bare"], strict=True)]


def _compared(pair: Mapping[str, Sequence[float]], scale: float, digits: int) -> tuple[str, str, str]:
    seconds = (Spread.of(pair[which]).words(digits, scale) for which in ("ours", "bare"))
    return (*seconds, Spread.of(_ratios(pair)).words(3))  # type: ignore[return-value]


def _said(pair: Mapping[str, Sequence[float]], budget: float) -> str:
    return verdict(Spread.of(_ratios(pair)).median <= budget)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench preprocess",
        description="Samples per processor second of parse, match, target, encode and pack by number of objects, and "
        "their ratios to the bare template and the bare assignment. Takes roughly 3 minutes. Exit status 0: everything "
        "was measured.",
    )
    shown = " ".join(map(str, _OBJECTS))
    parser.add_argument(
        "--objects",
        type=int,
        nargs="+",
        default=list(_OBJECTS),
        metavar="N",
        help=f"objects per sample (default {shown})",
    )
    shown = " ".join(map(str, _SAMPLES))
    parser.add_argument(
        "--samples",
        type=int,
        nargs="+",
        default=list(_SAMPLES),
        metavar="N",
        help=f"samples per pack of {RATE_BUDGET_OBJECTS} objects each (default {shown})",
    )
    parser.add_argument(
        "--crowd", type=int, default=_CROWD, help="boxes per side of the match (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=_REPEATS, help="repetitions (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-preprocess"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    refuse_below("objects", min(options.objects), 1, 1)
    refuse_below("samples", min(options.samples), 1, 1)
    refuse_below("crowd", options.crowd, 1, _CROWD)
    refuse_below("repeats", options.repeats, 2, _REPEATS)
    return options
