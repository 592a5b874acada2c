"""``swift-stage2 bench learning``: whether channel B pays, on scenes whose truth is known.

Every arm starts from the same stage-1 weights and runs the same number of optimizer steps with the same seed and
data; only ``b_ratio`` differs. All checkpoints are scored by one process on the same held-out scenes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.estimates import mean_and_range
from benchmarks.results import ResultTable, publish, say
from swift_stage2.demo.child_runs import ChildRuns, score, train
from swift_stage2.demo.demo_config import STAGE1, DemoJob, free_ports, write_config
from swift_stage2.demo.grounding_dataset import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.summary import summarise

NUM_HELD_OUT = 512
SCORES = {"F1": "f1", "precision": "precision", "recall": "recall", "mean IoU": "mean_iou"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningArm:
    """One trained job and how it scored."""

    b_ratio: float
    seed: int
    num_steps: int
    num_b_wanted: int
    num_b_run: int
    train_seconds: float
    """Wall time of rank 0's main thread, from the start of training to its end."""
    score: DetectionScore


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains every arm and scores all. Raises ChildFailed when a job did not end well."""
    kind = SceneKind(options.kind)
    with ChildRuns() as children:
        jobs = list(plan_jobs(directory, options.steps, options.seeds, options.b_ratios, kind))
        for job in jobs:
            train_arm(children, job, f"b_ratio {job.b_ratio:g}")
        start, *scores = score_all(children, directory, jobs)
    arms = [_arm(job, result) for job, result in zip(jobs, scores, strict=True)]
    facts = {"kind": kind, "stage1": asdict(start), "arms": [asdict(arm) for arm in arms]}
    publish(directory, "learning", facts, learning_table(start, arms), *notes(arms))
    return 0


def plan_jobs(
    directory: Path, num_steps: int, num_seeds: int, b_ratios: Sequence[float], kind: SceneKind
) -> Iterator[DemoJob]:
    """One job per seed and b_ratio, seeds outermost."""
    for seed in range(num_seeds):
        base = first_job(directory, num_steps, seed, max(b_ratios), kind)
        for b_ratio in b_ratios:
            yield replace(base, directory=base.directory / f"b{b_ratio:g}", b_ratio=b_ratio)


def first_job(directory: Path, num_steps: int, seed: int, b_ratio: float, kind: SceneKind) -> DemoJob:
    """A job in ``directory/seedN``, for its arms to be made of; writes the scenes of that seed."""
    place = directory / f"seed{seed}"
    job = DemoJob(directory=place, rows=Path(), num_steps=num_steps, b_ratio=b_ratio, seed=seed)
    num_train = num_train_samples(job)
    scenes = write_scenes(place, kind, num_train=num_train, num_held_out=NUM_HELD_OUT, seed=seed)
    return replace(job, rows=scenes.train)


def train_arm(
    children: ChildRuns, job: DemoJob, name: str, environment: Mapping[str, str] | None = None
) -> None:
    """Trains one arm to its end. Raises ChildFailed."""
    say(f"training seed {job.seed}: {name}")
    ports = free_ports(2)
    write_config(job, (ports[0], ports[1]))
    train(children, job, LiveView(sys.stdout, plain_every_steps=50), environment=environment or {})


def score_all(children: ChildRuns, directory: Path, jobs: Sequence[DemoJob]) -> list[DetectionScore]:
    """Stage 1 first, then every job's checkpoint, all on the held-out scenes of seed 0."""
    say("scoring every checkpoint on the same held-out scenes")
    held_out = directory / "seed0" / "held_out" / "rows.jsonl"
    return list(
        score(children, held_out, directory / "scores.json", (STAGE1, *(job.checkpoint for job in jobs)))
    )


def score_cells(scores: Sequence[DetectionScore]) -> tuple[str, ...]:
    """In the order of ``SCORES``: mean, with the range where there are several."""
    return tuple(
        mean_and_range([getattr(score, name) for score in scores], ".3f") for name in SCORES.values()
    )


def gains(first: Mapping[int, float], arms: Sequence[tuple[int, float]]) -> str:
    """F1 of arms, by seed, less that of the first arm of the same seed, for a table."""
    return mean_and_range([f1 - first[seed] for seed, f1 in arms], "+.3f")


def learning_table(start: DetectionScore, arms: Sequence[LearningArm]) -> ResultTable:
    """One row per b_ratio: means over seeds, with the range where there are several."""
    first = {arm.seed: arm.score.f1 for arm in arms if arm.b_ratio == arms[0].b_ratio}
    rows = [("stage 1, before", "", "", *score_cells([start]), "")]
    for b_ratio in dict.fromkeys(arm.b_ratio for arm in arms):
        group = [arm for arm in arms if arm.b_ratio == b_ratio]
        is_first = b_ratio == arms[0].b_ratio
        rows.append(
            (
                f"{b_ratio:g}",
                f"{sum(arm.num_b_run for arm in group)} of {sum(arm.num_b_wanted for arm in group)}",
                "" if is_first else gains(first, [(arm.seed, arm.score.f1) for arm in group]),
                *score_cells([arm.score for arm in group]),
                mean_and_range([arm.train_seconds for arm in group], ".0f"),
            )
        )
    over = f"F1 over b_ratio {arms[0].b_ratio:g} of the same seed"
    return ResultTable(
        f"Held-out detection after {arms[0].num_steps} steps, {start.num_images} scenes, {len(first)} seed(s): "
        "mean (lowest..highest)",
        ("b_ratio", "B steps run", over, *SCORES, "training, s"),
        rows,
    )


def notes(arms: Sequence[LearningArm]) -> list[str]:
    """Commands that ask further questions."""
    steps, seeds = arms[0].num_steps, len({arm.seed for arm in arms})
    common = f"swift-stage2 bench learning --steps {steps} --seeds {seeds}"
    return [
        f"To ask it of real digits: {common} --b-ratios 0,0.1,0.3 --kind digits",
        f"To ask it of half of all steps: {common} --b-ratios 0,0.5",
    ]


def _arm(job: DemoJob, result: DetectionScore) -> LearningArm:
    summary = summarise(job.run_dir)
    return LearningArm(
        b_ratio=job.b_ratio,
        seed=job.seed,
        num_steps=summary.num_steps,
        num_b_wanted=summary.num_b_wanted,
        num_b_run=summary.num_b_run,
        train_seconds=summary.activity[0].wall_s,
        score=result,
    )
