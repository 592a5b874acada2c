"""``swift-stage2 bench learning``: whether channel B pays, on scenes whose truth is known.

Every arm starts from the same stage-1 weights and runs the same number of optimizer steps with the same seed and
data; only ``b_ratio`` and the order of missed objects in B's targets differ. All checkpoints are scored by one process
on the same held-out scenes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from benchmarks.child_runs import ChildRuns, score, train
from benchmarks.estimates import mean_and_range
from benchmarks.results import ResultTable, grouped, publish, say
from swift_stage2.config import MissedOrder
from swift_stage2.demo.demo_config import STAGE1, DemoJob, write_config
from swift_stage2.demo.grounding_dataset import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.process.ports import free_ports
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.summary import summarise

NUM_HELD_OUT = 512
SCORES = {"F1": "f1", "precision": "precision", "recall": "recall", "mean IoU": "mean_iou"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArm:
    """One trained job and its score."""

    seed: int
    score: DetectionScore


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningArm(ScoredArm):
    """One share of channel B, and the order of its targets."""

    b_ratio: float
    missed_order: MissedOrder
    num_steps: int
    num_b_wanted: int
    num_b_run: int
    train_seconds: float
    """Wall time of rank 0's main thread, from the start of training to its end."""


ArmT = TypeVar("ArmT", bound=ScoredArm)
Columns = Mapping[str, Callable[[Sequence[ArmT]], str]]


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains every arm and scores all. Raises ChildFailed when a job did not end well."""
    kind = SceneKind(options.kind)
    orders = [MissedOrder(order) for order in options.orders]
    jobs = list(plan_jobs(directory, options.steps, options.seeds, options.b_ratios, kind, orders))
    start, scores = train_and_score(directory, [(job, _name(job), {}) for job in jobs])
    arms = [_arm(job, result) for job, result in zip(jobs, scores, strict=True)]
    facts = {"kind": kind, "stage1": asdict(start), "arms": [asdict(arm) for arm in arms]}
    publish(directory, "learning", facts, learning_table(start, arms), *notes(arms))
    return 0


def plan_jobs(
    directory: Path,
    num_steps: int,
    num_seeds: int,
    b_ratios: Sequence[float],
    kind: SceneKind,
    orders: Sequence[MissedOrder] = (MissedOrder.GIVEN,),
) -> Iterator[DemoJob]:
    """One job per seed, b_ratio and order of what was missed, seeds outermost; A alone has no such order."""
    for seed in range(num_seeds):
        base = first_job(directory, num_steps, seed, max(b_ratios), kind)
        for b_ratio in b_ratios:
            for order in orders if b_ratio else orders[:1]:
                place = base.directory / f"b{b_ratio:g}-{order}"
                yield replace(base, directory=place, b_ratio=b_ratio, missed_order=order)


def learning_table(start: DetectionScore, arms: Sequence[LearningArm]) -> ResultTable:
    """One row per b_ratio and order."""
    groups = grouped(arms, _name)
    reference = next(iter(groups))
    run: Columns[LearningArm] = {
        "arm": lambda group: _name(group[0]),
        "B steps run": lambda group: (
            f"{sum(arm.num_b_run for arm in group)} of {sum(arm.num_b_wanted for arm in group)}"
        ),
    }
    over = f"F1 over {reference} of the same seed"
    took: Columns[LearningArm] = {
        "training, s": lambda group: mean_and_range([arm.train_seconds for arm in group], ".0f")
    }
    return score_table(arms[0].num_steps, start, groups.values(), groups[reference], run, over, took)


def notes(arms: Sequence[LearningArm]) -> list[str]:
    """Commands that ask further questions."""
    steps, seeds = arms[0].num_steps, len({arm.seed for arm in arms})
    common = f"swift-stage2 bench learning --steps {steps} --seeds {seeds}"
    return [
        f"To ask it of real digits: {common} --b-ratios 0,0.1,0.3 --kind digits",
        f"To ask it of half of all steps: {common} --b-ratios 0,0.5",
    ]


def _name(arm: DemoJob | LearningArm) -> str:
    return f"b_ratio {arm.b_ratio:g}" + (f", {arm.missed_order}" if arm.b_ratio else "")


def _arm(job: DemoJob, result: DetectionScore) -> LearningArm:
    summary = summarise(job.run_dir)
    return LearningArm(
        b_ratio=job.b_ratio,
        missed_order=job.missed_order,
        seed=job.seed,
        num_steps=summary.num_steps,
        num_b_wanted=summary.num_b_wanted,
        num_b_run=summary.num_b_run,
        train_seconds=summary.activity[0].wall_s,
        score=result,
    )


# --- for every bench that scores trained arms --------------------------------------------------------


def first_job(directory: Path, num_steps: int, seed: int, b_ratio: float, kind: SceneKind) -> DemoJob:
    """A job in ``directory/seedN``, for its arms to be made of; writes the scenes of that seed."""
    place = directory / f"seed{seed}"
    job = DemoJob(directory=place, rows=Path(), num_steps=num_steps, b_ratio=b_ratio, seed=seed)
    num_train = num_train_samples(job)
    scenes = write_scenes(place, kind, num_train=num_train, num_held_out=NUM_HELD_OUT, seed=seed)
    return replace(job, rows=scenes.train)


def train_and_score(
    directory: Path, arms: Sequence[tuple[DemoJob, str, Mapping[str, str]]]
) -> tuple[DetectionScore, list[DetectionScore]]:
    """Trains jobs, each with its name and environment; scores stage 1 and all of them on seed 0's held-out scenes.

    Raises:
        ChildFailed: a job did not end well.
    """
    with ChildRuns() as children:
        for job, name, environment in arms:
            say(f"training seed {job.seed}: {name}")
            ports = free_ports(2)
            write_config(job, (ports[0], ports[1]))
            train(children, job, LiveView(sys.stdout, plain_every_steps=50), environment=environment)
        say("scoring every checkpoint on the same held-out scenes")
        held_out = directory / "seed0" / "held_out" / "rows.jsonl"
        checkpoints = (STAGE1, *(job.checkpoint for job, _, _ in arms))
        start, *scores = score(children, held_out, directory / "scores.json", checkpoints)
    return start, scores


def score_table(
    num_steps: int,
    start: DetectionScore,
    groups: Collection[Sequence[ArmT]],
    reference: Sequence[ArmT],
    columns: Columns[ArmT],
    over: str,
    last: Columns[ArmT] = MappingProxyType({}),
) -> ResultTable:
    """Stage 1, then one row per group: means over seeds, with the range where there are several.

    ``over`` heads the gain in F1 over the arm of ``reference`` with the same seed; the first column names the group.
    """
    first = {arm.seed: arm.score.f1 for arm in reference}
    seeds = {arm.seed for group in groups for arm in group}
    rows = [("stage 1, before", *[""] * len(columns), *_score_cells([start]), *[""] * len(last))]
    for group in groups:
        gains = [arm.score.f1 - first[arm.seed] for arm in group if arm.seed in first]
        cells = [column(group) for column in columns.values()]
        cells += ["" if group is reference else mean_and_range(gains, "+.3f")]
        cells += _score_cells([arm.score for arm in group])
        rows.append((*cells, *(column(group) for column in last.values())))
    return ResultTable(
        f"Held-out detection after {num_steps} steps, {start.num_images} scenes, {len(seeds)} seed(s): "
        "mean (lowest..highest)",
        (*columns, over, *SCORES, *last),
        rows,
    )


def _score_cells(scores: Sequence[DetectionScore]) -> list[str]:
    return [mean_and_range([getattr(score, name) for score in scores], ".3f") for name in SCORES.values()]
