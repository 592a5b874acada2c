"""``swift-stage2 bench turns``: does a second turn pay that asks the model to look again at what it missed?

Channel A first teaches stage 1 what that is; then both arms train B alone, and every run scores its own last answers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.processes import Processes
from benchmarks.results import publish
from benchmarks.scored_arms import ScoredArm, first_job, score_table, train
from swift_stage2.config import Mode, ServerEngine
from swift_stage2.demo.demo_config import DemoJob, server_entry
from swift_stage2.demo.scenes import SceneKind, answer_text
from swift_stage2.telemetry.event_log import event_path, read_events
from swift_stage2.telemetry.events import Evaluation
from swift_stage2.telemetry.summary import summarise

# The second turn is the page's.
PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
_FILES = r"```python\n# (?:look_again|second_look)\.py\n(.*?)```"
_STAGE2 = {
    "task": "second_look",
    "evaluation": {"every_steps": 1_000_000, "num_samples": 256},  # of the final weights alone
    "channel_b": {"packing": {"packing_length": 1024}, "max_truncated_ratio": 1.0},
}


def run(options: argparse.Namespace, directory: Path) -> int:
    """Teaches, trains both arms of every seed and tells their scores. Raises ChildFailed: a job did not end well."""
    jobs = [*plan_jobs(directory, options)]
    with Processes(directory / "logs") as processes:
        for job, changes in jobs:
            train(processes, job, {}, changes)
    one, two, *arms = (_arm_of(job) for job, _ in jobs[1:])
    when, references = f"after {options.steps} steps, last answers", {"F1 over one turn": arms[0].name}
    publish(directory, "turns", score_table(when, one.score, [*arms, two], references))
    return 0


def plan_jobs(directory: Path, options: argparse.Namespace) -> Iterator[tuple[DemoJob, dict[str, Any]]]:
    """Jobs with their changes: the lessons, both arms as these leave them, both arms of every seed."""
    blocks, plugin = re.findall(_FILES, PAGE.read_text(encoding="utf-8"), re.DOTALL), directory / "turns.py"
    plugin.write_text("\n".join(blocks), encoding="utf-8")
    lessons = first_job(directory, options.lessons, options.seeds, 0.0, SceneKind.SHAPES)
    add_second_turns(lessons.rows, *re.findall('AGAIN = "(.*)"', blocks[0]))
    yield replace(lessons, num_ranks=1, swift={"loss_scale": "last_round", "learning_rate": 3e-4}), {}
    swift = {"val_dataset": [str(directory / f"seed{options.seeds}" / "held_out" / lessons.rows.name)]}
    # The rate of a run's first step is 0, so that a run of one step scores what it began with.
    steps = {options.seeds + 1: 1} | dict.fromkeys(range(options.seeds), options.steps)
    for seed, num_steps in steps.items():
        base = first_job(directory, num_steps, seed, 1.0, SceneKind.SHAPES)
        base = replace(base, model=lessons.checkpoint, plugins=(plugin,), num_ranks=1, mode=Mode.INLINE)
        for turns, scheduler in ((1, {}), (2, {"multi_turn_scheduler": "look_again", "max_turns": 2})):
            server = server_entry(ServerEngine.VLLM)
            server["args"]["external_plugins"].append(str(plugin))
            server["args"] |= scheduler
            rollout = {"max_turns": turns, "request_timeout_s": 120.0}
            changes = {"launch": {"servers": [server]}, "rollout": rollout, "stage2_ab": _STAGE2}
            place = base.directory / f"{turns}-turn-{num_steps}-steps"
            yield replace(base, directory=place, swift=swift), changes


def add_second_turns(path: Path, again: str) -> None:
    """To every second row, behind a first answer that leaves out each object by an even chance."""
    draw, rows = random.Random(0).random, [*map(json.loads, path.read_text(encoding="utf-8").splitlines())]
    for row in rows[::2]:
        objects = zip(row["objects"]["ref"], row["objects"]["bbox"], strict=True)
        first = answer_text([each for each in objects if draw() < 0.5])
        row["messages"][1:1] = [{"role": "assistant", "content": first}, {"role": "user", "content": again}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _arm_of(job: DemoJob) -> ScoredArm:
    *_, last = (event for event in read_events(event_path(job.run_dir, 0)) if isinstance(event, Evaluation))
    summary = summarise(job.run_dir)
    score = {
        **last.ratios,
        "num_images": last.counts.num_answered,
        "steps": job.num_steps,
        "b_steps": summary.num_b_run,
        "rollouts": summary.totals["rollouts_prepared"],
        "wall_seconds": sum(summary.activity[0].values()),
    }
    return ScoredArm(name=job.directory.name, seed=job.seed, score=score)
