"""``swift-stage2 bench learning``: whether channel B pays, on scenes whose truth is known, and which objective does.

Every arm starts from the same stage-1 weights and runs the same number of optimizer steps with the same seed and
scenes; what share of them trains channel B differs, and by which objective. `swift-stage2 evaluate` scores all
checkpoints on the same held-out scenes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.estimates import mean_and_range
from benchmarks.results import ResultTable, grouped, publish
from benchmarks.scored_arms import Columns, ScoredArm, first_job, score_table, train_and_score
from swift_stage2.config import Objective
from swift_stage2.demo.demo_config import DemoJob
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.telemetry.summary import summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningArm(ScoredArm):
    name: str
    num_b_wanted: int
    num_b_run: int
    train_seconds: float


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains every arm and scores all. Raises ChildFailed: a job did not end well."""
    jobs = list(plan_jobs(directory, options))
    start, scores = train_and_score(directory, [(job, {}) for job in jobs])
    arms = []
    for job, score in zip(jobs, scores, strict=True):
        summary = summarise(job.run_dir)
        arms.append(
            LearningArm(
                name=name_of(job),
                seed=job.seed,
                score=score,
                num_b_wanted=summary.num_b_wanted,
                num_b_run=summary.num_b_run,
                train_seconds=sum(summary.activity[0].values()),
            )
        )
    publish(directory, "learning", learning_table(start, arms, options.steps))
    return 0


def plan_jobs(directory: Path, options: argparse.Namespace) -> Iterator[DemoJob]:
    """One job per seed, b_ratio and objective, seeds outermost; with b_ratio 0 there is no objective to choose."""
    for seed in range(options.seeds):
        kind = SceneKind(options.kind)
        base = first_job(directory, options.steps, seed, max(options.b_ratios), kind)
        base = replace(base, swift={"learning_rate": options.learning_rate})
        for b_ratio in options.b_ratios:
            for objective in options.objective if b_ratio else options.objective[:1]:
                job = replace(base, b_ratio=b_ratio, objective=Objective(objective))
                yield replace(job, directory=base.directory / name_of(job).replace(" ", "-"))


def name_of(job: DemoJob) -> str:
    return f"b_ratio {job.b_ratio:g} {job.objective}" if job.b_ratio else "A only"


def learning_table(start: Mapping[str, float], arms: Sequence[LearningArm], num_steps: int) -> ResultTable:
    groups = grouped(arms, lambda arm: arm.name)
    reference = next(iter(groups))
    columns: Columns[LearningArm] = {
        "arm": lambda group: group[0].name,
        "B steps run": lambda group: (
            f"{sum(arm.num_b_run for arm in group)} of {sum(arm.num_b_wanted for arm in group)}"
        ),
        "training, s": lambda group: mean_and_range([arm.train_seconds for arm in group], ".0f"),
    }
    over = f"F1 over {reference} of the same seed"
    return score_table(num_steps, start, list(groups.values()), groups[reference], columns, over)
