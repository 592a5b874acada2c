"""Arms that are trained from the same stage-1 weights and scored on the same held-out scenes, and their table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.estimates import gain_words, mean_and_range
from benchmarks.processes import DEADLINE_PER_STEP_S, START_DEADLINE_S, Processes
from benchmarks.results import ResultTable, grouped, say
from benchmarks.servers import write_job
from swift_stage2.demo.demo_config import STAGE1, DemoJob, evaluation_command, server_entry
from swift_stage2.demo.scenes import SceneKind, num_train_samples, write_scenes
from swift_stage2.runtime.network import free_ports

_NUM_HELD_OUT = 512
_SCORE_DEADLINE_S = 300.0  # per checkpoint
_COLUMNS = {
    "steps": ("steps", ".0f"),
    "B steps": ("b_steps", ".0f"),
    "versions behind": ("versions_behind", ".1f"),
    "core, s": ("core_seconds", ".0f"),
    "rollouts": ("rollouts", ".0f"),
    "wall, s": ("wall_seconds", ".0f"),
    "F1": ("f1", ".3f"),
    "F1 0.5..0.95": ("f1_50_95", ".3f"),
    "AP": ("ap", ".3f"),
    "AP without scores": ("ap_without_scores", ".3f"),
    "ECE": ("ece", ".3f"),
    "precision": ("precision", ".3f"),
    "recall": ("recall", ".3f"),
    "of 1": ("objects/1/recall", ".3f"),
    "of 2-3": ("objects/2-3/recall", ".3f"),
    "of 4": ("objects/4-7/recall", ".3f"),
    "twice, a picture": ("duplicates", ".3f"),
}
"""Of the table: name and form of what ``scores_of`` gives. What nobody has is no column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArm:
    name: str
    seed: int
    score: Mapping[str, float]


def first_job(directory: Path, num_steps: int, seed: int, b_ratio: float, kind: SceneKind) -> DemoJob:
    """A job in ``directory/seedN``, for its arms to be made of; writes the scenes of that seed."""
    place = directory / f"seed{seed}"
    job = DemoJob(directory=place, rows=Path(), num_steps=num_steps, b_ratio=b_ratio, seed=seed)
    num_train = num_train_samples(job)
    scenes = write_scenes(place, kind, num_train=num_train, num_held_out=_NUM_HELD_OUT, seed=seed)
    return replace(job, rows=scenes.train)


def train_and_score(
    directory: Path, arms: Sequence[tuple[DemoJob, Mapping[str, str]]]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Trains jobs, each with its environment; scores stage 1 and all of them on seed 0's held-out scenes.

    Raises:
        ChildFailed: a job did not end well.
    """
    with Processes(directory / "logs") as processes:
        for job, environment in arms:
            train(processes, job, environment, {})
        say("scoring every checkpoint on the same held-out scenes")
        rows = directory / "seed0" / "held_out" / "rows.jsonl"
        start, *scores = [
            scores_of(score(processes, rows, checkpoint, directory / "scores" / str(number)))
            for number, checkpoint in enumerate((STAGE1, *(job.checkpoint for job, _ in arms)))
        ]
    return start, scores


def train(
    processes: Processes, job: DemoJob, environment: Mapping[str, str], changes: Mapping[str, Any]
) -> None:
    """Launches a job, with ``changes`` of its configuration; one that has trained before goes on."""
    name = "-".join((*job.directory.parts[-2:], str(job.num_steps)))
    say(f"training {name}")
    http, group = free_ports(2)
    server = {"launch": {"servers": [server_entry(job.engine)]}} if job.b_ratio else {}
    path = write_job(job, (http, group), {**server, **changes})
    words = ("-m", "swift_stage2", "launch", "--verbose", str(path), *["--resume"] * job.run_dir.exists())
    deadline_s = START_DEADLINE_S + DEADLINE_PER_STEP_S * job.num_steps
    processes.run(name, (sys.executable, *words), deadline_s=deadline_s, environment=environment)


def correct(processes: Processes, rows: Path, checkpoint: Path, output: Path) -> None:
    """Writes ``rows`` as a checkpoint finds their objects, greedily; missed ones follow in reading order."""
    words = [*evaluation_command(rows, checkpoint, output), "--missed-order", "reading", "--force"]
    words[words.index("evaluate")] = "correct"
    name = "-".join(("correct", *output.parts[-3:-1], checkpoint.name))
    processes.run(name, tuple(words), deadline_s=START_DEADLINE_S)


def score(processes: Processes, rows: Path, checkpoint: Path, output: Path) -> dict[str, Any]:
    """Scores a checkpoint by ``evaluate``; leaves out what it tells of classes, intervals and calibration."""
    name = "-".join(("scores", *output.parts[-3:]))
    processes.run(name, evaluation_command(rows, checkpoint, output), deadline_s=_SCORE_DEADLINE_S)
    found: dict[str, Any] = json.loads((output / "evaluation.json").read_text(encoding="utf-8"))
    values = {name: round(metric["value"], 6) for name, metric in found.pop("metrics").items()}
    kept = {name: each for name, each in found.items() if name not in ("data", "source", "calibration")}
    return kept | {"metrics": {name: each for name, each in values.items() if not name.startswith("class/")}}


def scores_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Its numbers, and its metrics without ``eval/``; ``duplicates`` are TIDE's, per picture."""
    numbers = {name: each for name, each in found.items() if isinstance(each, (int, float))}
    metrics = {name.removeprefix("eval/"): each for name, each in found["metrics"].items()}
    return numbers | metrics | {"duplicates": found["errors"]["Dupe"]["count"] / found["num_images"]}


def score_table(
    when: str, start: Mapping[str, float], arms: Sequence[ScoredArm], references: Mapping[str, str]
) -> ResultTable:
    """The table: a row for stage 1, then one per arm with its mean over seeds, and the range where there are several.

    ``references`` by heading: the arm over which the gain in F1 is told, seed by seed.
    """
    groups, scored = grouped(arms, lambda arm: arm.name), [start, *(arm.score for arm in arms)]
    shown = {heading: each for heading, each in _COLUMNS.items() if any(each[0] in score for score in scored)}

    def cells(scores: Sequence[Mapping[str, float]]) -> list[str]:
        found = ([each[name] for each in scores if name in each] for name, _ in shown.values())
        return [mean_and_range(own, form) for own, (_, form) in zip(found, shown.values(), strict=True)]

    def gain(group: Sequence[ScoredArm], reference: str) -> str:
        first = {arm.seed: arm.score["f1"] for arm in groups[reference] if arm.name != group[0].name}
        return gain_words([arm.score["f1"] - first[arm.seed] for arm in group if arm.seed in first], "+.3f")

    told = {heading: name for heading, name in references.items() if name in groups}
    rows = [("before", *[""] * len(told), *cells([start]))]
    for name, group in groups.items():
        gains = (gain(group, other) for other in told.values())
        rows.append((name, *gains, *cells([arm.score for arm in group])))
    num_seeds = max(map(len, groups.values()), default=0)
    title = f"Held-out detection {when}, {start['num_images']} scenes, {num_seeds} seed(s): mean (lowest..highest)"
    return ResultTable(title, ("arm", *told, *shown), rows)
