"""``swift-stage2 bench interference``: what channel B's pipeline costs the steps of channel A beside it.

One rank with one torch thread and a core to spare, rollouts from a stand-in that waits without computing, packs at the
rate at which they are trained. In alternating blocks of one run the pipeline works or is switched off; the threads' own
clocks say where the difference is spent.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.child_runs import ChildRuns
from benchmarks.clocks import Clock
from benchmarks.estimates import Bounded, Floats, PairedRatio, Spread, compare, verdict
from benchmarks.learner_job import Arm, ArmRecords, run_arm, write_rows
from benchmarks.plugins.pipeline import BLOCK_VARIABLE, SWITCHED, is_on
from benchmarks.results import ResultTable, publish, say
from benchmarks.servers import BenchServers, start_stand_in
from swift_stage2.config import Preprocessing
from swift_stage2.errors import ChildFailed
from swift_stage2.scheduling.bresenham import wants_channel_b

BUDGET = 1.03
B_RATIO = 0.25
_SETTLING = 8
_NEVER = 1_000_000  # one round at the start: rounds have a bench of their own
_CLOCKS = {
    "wall": "the step",
    "main": "– main thread on a core",
    "queued": "– main thread ready, without a core",
    "blocked": "– main thread blocked: interpreter lock, files",
    "others": "all other threads of the learner on a core",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """One run says this. Seconds per compared step, pair by pair."""

    ratio: PairedRatio
    ratio_on_core: PairedRatio
    """Without the time in which the main thread was ready and had no core, which other programs may have had."""
    off: Mapping[str, list[float]]
    """By clock, pipeline switched off; the names are those of ``_CLOCKS``."""
    on: Mapping[str, list[float]]
    num_b_steps: int
    """Of channel B while the pipeline was on."""
    num_b_wanted: int
    num_rollouts: int
    others_per_step: float
    """Seconds of all other threads per step while the pipeline was on, steps of channel B among them."""

    def more(self, clock: str) -> list[float]:
        """Seconds that each block's step took longer with the pipeline on, pair by pair."""
        return [on - off for on, off in zip(self.on[clock], self.off[clock], strict=True)]


@dataclass(frozen=True, slots=True)
class SwitchedBlocks:
    """``num_pairs`` pairs of blocks of ``num_steps`` steps, of which the first ``num_settling`` are not compared."""

    num_steps: int
    num_settling: int
    num_pairs: int

    @property
    def total_steps(self) -> int:
        return 2 * self.num_pairs * self.num_steps

    def compared_steps(self, pair: int, b_ratio: float) -> tuple[list[int], list[int]]:
        """Steps of a pair's block without and of its block with the pipeline, at the same places in both.

        They are those that channel A trains by the schedule, in both blocks.
        """
        first = 2 * pair * self.num_steps
        blocks = [range(start, start + self.num_steps) for start in (first, first + self.num_steps)]
        off, on = sorted(blocks, key=lambda steps: is_on(steps[0], self.num_steps))
        places = [
            place
            for place in range(max(1, self.num_settling), self.num_steps)
            if not any(wants_channel_b(steps[place], b_ratio) for steps in blocks)
        ]
        return [off[place] for place in places], [on[place] for place in places]


def run(options: argparse.Namespace, directory: Path) -> int:
    """Raises ChildFailed when a process did not end well, or channel B did not run while it was on."""
    blocks = SwitchedBlocks(options.block_steps, _SETTLING, options.pairs)
    rows = write_rows(directory)
    with BenchServers(directory / "logs") as servers, ChildRuns() as children:
        ports = start_stand_in(servers, rows, options.latency_s)
        found: dict[Preprocessing, Interference] = {}
        for variant in map(Preprocessing, options.preprocessing):
            say(f"preprocessing in a {variant}: {blocks.total_steps} steps")
            arm = Arm(
                name=f"learner-{variant}",
                directory=directory / variant,
                rows=rows,
                num_steps=blocks.total_steps,
                b_ratio=B_RATIO,
                ports=ports,
                pipeline=SWITCHED,
                prefetch={"sync_every_steps": _NEVER},
                preprocessing=variant,
                environment={BLOCK_VARIABLE: str(blocks.num_steps)},
            )
            found[variant] = interference_of(run_arm(children, arm), blocks)
    facts = {
        "variants": {variant: asdict(each) for variant, each in found.items()},
        "blocks": asdict(blocks),
        "latency_s": options.latency_s,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    tables = [table(each, variant) for variant, each in found.items() for table in (ratio_table, clock_table)]
    said = [f"{variant}: {note}" for variant, each in found.items() for note in notes(each)]
    publish(directory, "interference", facts, *tables, *said)
    return 0


def interference_of(records: ArmRecords, blocks: SwitchedBlocks) -> Interference:
    """Compares the steps of every pair.

    Raises ChildFailed: channel B trained nothing while it was on, so that there is nothing to compare.
    """
    seconds = step_clocks(records.clock)
    off: dict[str, list[float]] = {name: [] for name in _CLOCKS}
    on: dict[str, list[float]] = {name: [] for name in _CLOCKS}
    compared: dict[str, tuple[list[Floats], list[Floats]]] = {"wall": ([], []), "on_core": ([], [])}
    seconds["on_core"] = seconds["wall"] - seconds["queued"]
    for pair in range(blocks.num_pairs):
        off_steps, on_steps = blocks.compared_steps(pair, B_RATIO)
        for name, (plain, ours) in compared.items():
            plain.append(seconds[name][off_steps])
            ours.append(seconds[name][on_steps])
        for name in _CLOCKS:
            off[name].append(float(seconds[name][off_steps].mean()))
            on[name].append(float(seconds[name][on_steps].mean()))
    steps = [step for step in records.of_kind("step") if is_on(step["step"], blocks.num_steps)]
    num_b_steps = sum(step["channel"] == "B" for step in steps)
    if num_b_steps == 0:
        raise ChildFailed(
            "channel B must run while its pipeline is on, got no step of it; see its logs under --output, lower "
            "--latency-s or raise --block-steps"
        )
    return Interference(
        ratio=compare(*compared["wall"]),
        ratio_on_core=compare(*compared["on_core"]),
        off=off,
        on=on,
        num_b_steps=num_b_steps,
        num_b_wanted=sum(bool(step["wants_b"]) for step in steps),
        num_rollouts=sum(batch["num_rollouts"] for batch in records.of_kind("batch")),
        others_per_step=float(np.mean([seconds["others"][step["step"]] for step in steps])),
    )


def step_clocks(clock: Clock) -> dict[str, Floats]:
    """Seconds of every step by the names of ``_CLOCKS``; those of step 0, which has no beginning, are NaN."""

    def per_step(name: str) -> Floats:
        return np.diff(np.asarray(clock[name], dtype=np.float64), prepend=np.nan) / 1e9

    wall, main, queued = per_step("end_ns"), per_step("main_ns"), per_step("queued_ns")
    return {
        "wall": wall,
        "main": main,
        "queued": queued,
        "blocked": wall - main - queued,
        "others": per_step("others_ns"),
    }


def ratio_table(found: Interference, variant: Preprocessing) -> ResultTable:
    """The ratios beside their budget. The sum sees what the median does not: most steps meet no production."""
    ratio = found.ratio
    rows = [
        _ratio_row("of summed steps", ratio.total),
        _ratio_row("of single steps, median (quartiles)", ratio.median, ratio.quartiles),
        _ratio_row("of summed steps, less waits for a core", found.ratio_on_core.total),
    ]
    return ResultTable(
        f"Preprocessing in a {variant}: A-steps while the pipeline works, over those while it is off: "
        f"{ratio.num_pairs} pairs of blocks, "
        f"{ratio.num_steps} steps each",
        ("ratio", "measured", "upper 95 %", f"budget {BUDGET}"),
        rows,
    )


def _ratio_row(
    name: str, found: Bounded, quartiles: tuple[float, float] | None = None
) -> tuple[str, str, str, str]:
    spread = "" if quartiles is None else " ({:.3f}..{:.3f})".format(*quartiles)
    said = f"{verdict(found.value <= BUDGET)}; bound {verdict(found.upper_95 <= BUDGET)}"
    return name, f"{found.value:.4f}{spread}", f"{found.upper_95:.4f}", said


def clock_table(found: Interference, variant: Preprocessing) -> ResultTable:
    rows = []
    for name, words in _CLOCKS.items():
        values = (found.off[name], found.on[name], found.more(name))
        cells = (Spread.of(each).words(2, 1e3) for each in values)
        rows.append((words, *cells))
    return ResultTable(
        f"Preprocessing in a {variant}: milliseconds of a compared step, mean of each block, median (quartiles) over "
        "the blocks",
        ("", "off", "on", "on less off, pair by pair"),
        rows,
    )


def notes(found: Interference) -> list[str]:
    """One sentence tells what worked while it was on, and how much of the cost is the interpreter's lock."""
    blocked = Spread.of(found.more("blocked"))
    off = Spread.of(found.off["wall"])
    return [
        f"While it was on: {found.num_b_steps} of {found.num_b_wanted} wanted B steps ran; "
        f"{found.num_rollouts} rollouts in the whole run; all threads of the learner but the main one used "
        f"{found.others_per_step * 1e3:.1f} ms per step, B steps among them. The main thread was blocked "
        f"{blocked.words(1, 1e3)} ms per step more, {blocked.median / off.median:.1%} of a step, most of it for the "
        "interpreter's lock."
    ]
