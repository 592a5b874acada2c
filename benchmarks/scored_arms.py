"""Arms that are trained from the same stage-1 weights and scored on the same held-out scenes, and their table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.estimates import gain_words, mean_and_range
from benchmarks.processes import DEADLINE_PER_STEP_S, START_DEADLINE_S, Processes
from benchmarks.results import ResultTable, say
from swift_stage2.demo.demo_config import STAGE1, DemoJob, evaluation_command, write_config
from swift_stage2.demo.scenes import SceneKind, num_train_samples, write_scenes
from swift_stage2.runtime.network import free_ports

_NUM_HELD_OUT = 512
_SCORE_DEADLINE_S = 300.0  # per checkpoint
_SCORES = {
    "F1": "f1",
    "AP": "ap",
    "precision": "precision",
    "recall": "recall",
    "mean IoU": "mean_iou",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArm:
    seed: int
    score: Mapping[str, float]


ArmT = TypeVar("ArmT", bound=ScoredArm)
Columns = Mapping[str, Callable[[Sequence[ArmT]], str]]
"""Headings, each with the cell that it makes of the arms of all seeds."""


def first_job(directory: Path, num_steps: int, seed: int, b_ratio: float, kind: SceneKind) -> DemoJob:
    """A job in ``directory/seedN``, for its arms to be made of; writes the scenes of that seed."""
    place = directory / f"seed{seed}"
    job = DemoJob(directory=place, rows=Path(), num_steps=num_steps, b_ratio=b_ratio, seed=seed)
    num_train = num_train_samples(job)
    scenes = write_scenes(place, kind, num_train=num_train, num_held_out=_NUM_HELD_OUT, seed=seed)
    return replace(job, rows=scenes.train)


def train_and_score(
    directory: Path, arms: Sequence[tuple[DemoJob, Mapping[str, str]]]
) -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
    """Trains jobs, each with its environment; scores stage 1 and all of them on seed 0's held-out scenes.

    Raises:
        ChildFailed: a job did not end well.
    """
    with Processes(directory / "logs") as processes:
        for job, environment in arms:
            name = "-".join(job.directory.parts[-2:])
            say(f"training {name}")
            http, group = free_ports(2)
            write_config(job, (http, group))
            processes.run(
                name,
                (sys.executable, "-m", "swift_stage2", "launch", "--verbose", str(job.config_path)),
                deadline_s=START_DEADLINE_S + DEADLINE_PER_STEP_S * job.num_steps,
                environment=environment,
            )
        say("scoring every checkpoint on the same held-out scenes")
        rows, scores = directory / "seed0" / "held_out" / "rows.jsonl", list[Mapping[str, float]]()
        for number, checkpoint in enumerate((STAGE1, *(job.checkpoint for job, _ in arms))):
            output = directory / "scores" / str(number)
            command = evaluation_command(rows, checkpoint, output)
            processes.run(f"evaluation-{number}", command, deadline_s=_SCORE_DEADLINE_S)
            scores.append(read_scores(output))
    return scores[0], scores[1:]


def score_table(
    num_steps: int,
    start: Mapping[str, float],
    groups: Collection[Sequence[ArmT]],
    reference: Sequence[ArmT],
    columns: Columns[ArmT],
    over: str,
) -> ResultTable:
    """Stage 1, then one row per group: means over seeds, with the range where there are several.

    ``over`` heads the gain in F1 over the arm of ``reference`` with the same seed; the first column names the group.
    """
    first = {arm.seed: arm.score["f1"] for arm in reference}
    seeds = {arm.seed for group in groups for arm in group}
    rows = [("stage 1, before", *[""] * len(columns), *_score_cells([start]))]
    for group in groups:
        gains = [arm.score["f1"] - first[arm.seed] for arm in group if arm.seed in first]
        cells = [column(group) for column in columns.values()]
        gained = "" if group is reference else gain_words(gains, "+.3f")
        rows.append((*cells, gained, *_score_cells([arm.score for arm in group])))
    return ResultTable(
        f"Held-out detection after {num_steps} steps, {start['num_images']} scenes, {len(seeds)} seed(s): "
        "mean (lowest..highest)",
        (*columns, over, *_SCORES),
        rows,
    )


def _score_cells(scores: Sequence[Mapping[str, float]]) -> list[str]:
    return [mean_and_range([score[name] for score in scores], ".3f") for name in _SCORES.values()]


def read_scores(output: Path) -> dict[str, float]:
    """Metrics of all objects that ``evaluate`` has left, by name, and ``num_images``; a ratio of nothing is 0."""
    found = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    metrics, nothing = found["metrics"], {"value": 0.0}
    scores = {name: metrics.get(f"eval/{name}", nothing)["value"] for name in _SCORES.values()}
    return {**scores, "num_images": found["num_images"]}
