"""``swift-stage2 bench overhead``: what the trainer costs while channel B is off, against plain ``swift sft``.

Both arms get the same arguments, data and plugin. They train at the same time, each on its own half of the cores,
and change halves from pair to pair, so that a machine whose speed changes changes it for both; or, with
``--in-turns``, one after the other on all cores. Besides whole steps, the time in our hooks is measured directly.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from benchmarks.child_runs import (
    DEADLINE_PER_STEP_S,
    START_DEADLINE_S,
    Child,
    ChildRuns,
    torchrun,
    write_job_config,
)
from benchmarks.clocks import DIRECTORY_VARIABLE, MEETING_VARIABLE, PLUGINS, STEP_CLOCK, Clock, read_clock
from benchmarks.cores import split_cores
from benchmarks.estimates import Floats, PairedRatio, Spread, compare, num_common, step_seconds
from benchmarks.results import ResultTable, publish, say
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.grounding_dataset import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.errors import ChildFailed

NUM_WARMUP = 5
_LEAST_STEPS = NUM_WARMUP + 2
HOOKS_BUDGET = 0.01
STEP_BUDGET = 1.03


class ArmName(StrEnum):
    PLAIN = "plain"  # ``swift sft`` itself
    OURS = "ours"  # ``swift_stage2 train`` with b_ratio 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HookShare:
    """Time in our hooks on rank 0, as a share of the steps it was measured in."""

    hooks: float
    """Our own code: planning, counting, audit, TensorBoard."""
    agree: float
    """The control group's all-reduces, in which a rank also waits for the slower one."""
    median_hooks_ms: float
    """Per step, without the all-reduces."""
    median_agree_ms: float


def run(options: argparse.Namespace, directory: Path) -> int:
    """Runs all pairs. Raises ChildFailed when an arm did not end well, or the arms hardly trained at the same time."""
    started = time.monotonic()
    clocks: dict[ArmName, list[Clock]] = {arm: [] for arm in ArmName}
    job = _job(directory, options.steps, options.ranks)
    write_scenes(directory, SceneKind.SHAPES, num_train=num_train_samples(job), num_held_out=1, seed=0)
    with ChildRuns() as children:
        for pair in range(options.repeats):
            arms = order_of_arms(pair)
            say(f"pair {pair + 1} of {options.repeats}: {', '.join(arms)}")
            place = directory / f"pair{pair}"
            for arm, clock in _run_pair(children, arms, job, place, in_turns=options.in_turns).items():
                clocks[arm].append(clock)
    seconds = {arm: [step_seconds(clock["end_ns"], NUM_WARMUP) for clock in clocks[arm]] for arm in ArmName}
    ratio, share = compare(seconds[ArmName.PLAIN], seconds[ArmName.OURS]), hook_share(clocks[ArmName.OURS])
    facts = {"ratio": asdict(ratio), "hooks": asdict(share), "num_ranks": job.num_ranks, "clocks": clocks}
    facts["in_turns"] = options.in_turns
    table = overhead_table(seconds, ratio, share, in_turns=options.in_turns)
    publish(directory, "overhead", facts, table)
    say(f"took {time.monotonic() - started:.0f} s")
    return 0


def order_of_arms(pair: int) -> tuple[ArmName, ArmName]:
    """Who goes first, or has the first half of the cores, alternates: no drift and no core favours an arm."""
    return (ArmName.PLAIN, ArmName.OURS) if pair % 2 == 0 else (ArmName.OURS, ArmName.PLAIN)


def hook_share(clocks: Sequence[Clock]) -> HookShare:
    """Shares over all pairs, warm-up left out; every clock holds running totals at the end of each step."""

    def per_step(name: str) -> Floats:
        return np.concatenate([step_seconds(clock[name], NUM_WARMUP) for clock in clocks])

    steps, hooks, agree = per_step("end_ns"), per_step("hooks_ns"), per_step("agree_ns")
    return HookShare(
        hooks=float(hooks.sum() / steps.sum()),
        agree=float(agree.sum() / steps.sum()),
        median_hooks_ms=float(np.median(hooks)) * 1e3,
        median_agree_ms=float(np.median(agree)) * 1e3,
    )


def overhead_table(
    seconds: Mapping[ArmName, Sequence[Floats]], ratio: PairedRatio, share: HookShare, *, in_turns: bool
) -> ResultTable:
    median = Spread(ratio.quartiles[0], ratio.median.value, ratio.quartiles[1])
    times = {arm: Spread.of(np.concatenate(seconds[arm])).words(1, 1e3) for arm in ArmName}
    rows = [
        *((f"step {arm}, ms (quartiles)", words, "", "") for arm, words in times.items()),
        ("step ratio, median (quartiles)", median.words(4), f"{ratio.median.upper_95:.4f}", f"{STEP_BUDGET}"),
        ("ratio of summed steps", f"{ratio.total.value:.4f}", f"{ratio.total.upper_95:.4f}", ""),
        ("own hooks, share of step", f"{share.hooks:.3%}", "", f"{HOOKS_BUDGET:.0%}"),
        ("own hooks, median ms", f"{share.median_hooks_ms:.3f}", "", ""),
        ("all-reduce and wait, share", f"{share.agree:.3%}", "", ""),
        ("all-reduce and wait, median ms", f"{share.median_agree_ms:.3f}", "", ""),
    ]
    return ResultTable(
        f"b_ratio 0 against plain swift sft, {ratio.num_pairs} pairs of {ratio.num_steps} steps, "
        + ("in turns" if in_turns else "side by side"),
        ("", "measured", "upper 95 %", "budget"),
        rows,
    )


def arm_command(arm: ArmName, job: DemoJob) -> tuple[str, ...]:
    """The command line of one arm. The job's YAML must have been written."""
    if arm is ArmName.OURS:
        return torchrun(job.num_ranks, "swift_stage2", "train", str(job.config_path))
    arguments = load_config(job.config_path).swift_arguments()
    return torchrun(job.num_ranks, "benchmarks.swift_program", "sft", *arguments)


def _run_pair(
    children: ChildRuns, arms: tuple[ArmName, ArmName], job: DemoJob, directory: Path, *, in_turns: bool
) -> dict[ArmName, Clock]:
    """In turns on all cores; or together, the first arm on the first half of the cores.

    Of arms that ran together only steps are kept that both made while both trained.
    """
    halves = split_cores()
    meeting = {MEETING_VARIABLE: f"{directory / 'meeting'}:{2 * job.num_ranks}"}
    started = []
    for arm, half in zip(arms, halves, strict=True):
        own = replace(job, directory=directory / arm)
        write_job_config(own)
        clock = {DIRECTORY_VARIABLE: str(own.directory / "clock"), **({} if in_turns else meeting)}
        started.append(
            Child(
                name=arm,
                argv=arm_command(arm, own),
                environment=clock,
                cores=frozenset(set().union(*halves) if in_turns else half),
            )
        )
    for group in [[each] for each in started] if in_turns else [started]:
        deadline_s = START_DEADLINE_S + len(group) * DEADLINE_PER_STEP_S * job.num_steps
        children.run_together(group, log_dir=directory / "logs", deadline_s=deadline_s)
    clocks: dict[ArmName, Clock] = {arm: read_clock(directory / arm / "clock") for arm in arms}
    if in_turns:
        return clocks
    num_steps = num_common([clock["end_ns"] for clock in clocks.values()])
    if num_steps < _LEAST_STEPS:
        raise ChildFailed(
            f"both arms must train side by side for at least {_LEAST_STEPS} steps, got {num_steps}: one was that much "
            "faster; run it on a quieter machine, or with more --steps"
        )
    return {
        arm: {name: numbers[:num_steps] for name, numbers in clock.items()} for arm, clock in clocks.items()
    }


def _job(root: Path, num_steps: int, num_ranks: int) -> DemoJob:
    return DemoJob(
        directory=root,
        rows=root / "train" / "rows.jsonl",
        num_steps=num_steps,
        b_ratio=0.0,
        num_ranks=num_ranks,
        plugins=(PLUGINS / "clocks.py",),
        swift={"callbacks": [STEP_CLOCK], "save_strategy": "no"},
    )
