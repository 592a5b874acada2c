"""``swift-stage2 bench overhead``: what the trainer costs while channel B is off, against plain ``swift sft``.

Both arms get the same arguments, data and plugin. They train at the same time, each on its own half of the cores, and
change halves from pair to pair, so that a machine whose speed changes changes it for both. Besides whole steps, the
time in our hooks is measured directly.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clocks import DIRECTORY_VARIABLE, MEETING_VARIABLE, PLUGINS, STEP_CLOCK, Clock, read_clock
from benchmarks.estimates import Floats, Ratio, Spread, paired_ratio, step_seconds
from benchmarks.processes import (
    DEADLINE_PER_STEP_S,
    START_DEADLINE_S,
    Processes,
    split_cores,
    started_on,
    torchrun,
)
from benchmarks.results import ResultTable, publish, say
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import DemoJob, write_config
from swift_stage2.demo.scenes import SceneKind, num_train_samples, write_scenes
from swift_stage2.errors import ChildFailed
from swift_stage2.runtime.network import free_ports

NUM_WARMUP = 5
_LEAST_STEPS = NUM_WARMUP + 2
HOOKS_BUDGET = 0.01
STEP_BUDGET = 1.03

_ROWS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": {"padding_free": True},
    "packing": {
        "packing": True,
        "packing_length": 1024,
        "per_device_train_batch_size": 1,
        "lazy_tokenize": False,
    },
}
"""ms-swift's arguments by the name of a way to put rows into a micro-batch."""


class ArmName(StrEnum):
    PLAIN = "plain"  # ``swift sft`` itself
    OURS = "ours"  # ``swift_stage2 train`` with b_ratio 0


def run(options: argparse.Namespace, directory: Path) -> int:
    """Runs all pairs. Raises ChildFailed when an arm did not end well, or the arms hardly trained at the same time."""
    job = DemoJob(
        directory=directory,
        rows=directory / "train" / "rows.jsonl",
        num_steps=options.steps,
        b_ratio=0.0,
        num_ranks=options.ranks,
        plugins=(PLUGINS / "clocks.py", PLUGINS / "packed_rows.py"),
        swift={
            "callbacks": [STEP_CLOCK],
            "save_strategy": "no",
            "include_num_input_tokens_seen": True,
            **_ROWS[options.rows],
        },
    )
    write_scenes(directory, SceneKind.SHAPES, num_train=num_train_samples(job), num_held_out=1, seed=0)
    clocks: dict[ArmName, list[Clock]] = {arm: [] for arm in ArmName}
    with Processes(directory / "logs") as processes:
        for pair in range(options.repeats):
            arms = list(ArmName) if pair % 2 == 0 else list(ArmName)[::-1]
            say(f"pair {pair + 1} of {options.repeats}: {', '.join(arms)}")
            for arm, clock in _run_pair(processes, arms, job, directory / f"pair{pair}").items():
                clocks[arm].append(clock)
    publish(directory, "overhead", overhead_table(clocks))
    return 0


def overhead_table(clocks: Mapping[ArmName, Sequence[Clock]]) -> ResultTable:
    """Of all pairs, warm-up left out; every clock holds running totals at the end of each step."""

    def per_step(arm: ArmName, column: str) -> Floats:
        return np.concatenate([step_seconds(clock[column], NUM_WARMUP) for clock in clocks[arm]])

    seconds = {arm: [step_seconds(clock["end_ns"], NUM_WARMUP) for clock in clocks[arm]] for arm in ArmName}
    ratio: Ratio = paired_ratio(seconds[ArmName.PLAIN], seconds[ArmName.OURS])
    steps = per_step(ArmName.OURS, "end_ns")
    shares = {name: per_step(ArmName.OURS, f"{name}_ns") for name in ("hooks", "agree")}
    tokens = {
        arm: 1e9 * per_step(arm, "tokens").sum() / np.concatenate(seconds[arm]).sum() for arm in ArmName
    }
    rows = [
        *(
            (f"step {arm}, ms (quartiles)", Spread.of(np.concatenate(seconds[arm])).words(1, 1e3), "")
            for arm in ArmName
        ),
        ("median step ratio (95 % bounds)", ratio.words(), f"upper bound {STEP_BUDGET}"),
        *((f"tokens per second {arm}", f"{tokens[arm]:.1f}", "") for arm in ArmName),
        ("own hooks, share of step", f"{shares['hooks'].sum() / steps.sum():.3%}", f"{HOOKS_BUDGET:.0%}"),
        ("all-reduce and wait, share", f"{shares['agree'].sum() / steps.sum():.3%}", ""),
    ]
    num_pairs = len(clocks[ArmName.OURS])
    title = f"b_ratio 0 against plain swift sft, side by side, {num_pairs} pairs"
    return ResultTable(title, ("", "measured", "budget"), rows)


def arm_command(arm: ArmName, job: DemoJob) -> tuple[str, ...]:
    """The command line of one arm. The job's YAML must have been written."""
    if arm is ArmName.OURS:
        return torchrun(job.num_ranks, "swift_stage2", "train", str(job.config_path))
    arguments = load_config(job.config_path).swift_arguments()
    return torchrun(job.num_ranks, "benchmarks.swift_program", "sft", *arguments)


def _run_pair(
    processes: Processes, arms: Sequence[ArmName], job: DemoJob, directory: Path
) -> dict[ArmName, Clock]:
    """The first arm on the first half of the cores; the steps that both made while both trained."""
    meeting = f"{directory / 'meeting'}:{2 * job.num_ranks}"
    trees = []
    for arm, half in zip(arms, split_cores(), strict=True):
        own = replace(job, directory=directory / arm)
        http, group = free_ports(2)
        write_config(own, (http, group))
        environment = {DIRECTORY_VARIABLE: str(own.directory / "clock"), MEETING_VARIABLE: meeting}
        with started_on(half):
            trees.append(
                processes.start_process(f"{directory.name}-{arm}", arm_command(arm, own), environment)
            )
    processes.wait_for_all(trees, START_DEADLINE_S + 2 * DEADLINE_PER_STEP_S * job.num_steps)
    clocks: dict[ArmName, Clock] = {arm: read_clock(directory / arm / "clock") for arm in arms}
    first_end = min(clock["end_ns"][-1] for clock in clocks.values())
    num_steps = min(sum(end <= first_end for end in clock["end_ns"]) for clock in clocks.values())
    if num_steps < _LEAST_STEPS:
        raise ChildFailed(
            f"both arms must train side by side for at least {_LEAST_STEPS} steps, got {num_steps}: one was that much "
            "faster; run it on a quieter machine, or with more --steps"
        )
    return {
        arm: {name: numbers[:num_steps] for name, numbers in clock.items()} for arm, clock in clocks.items()
    }
