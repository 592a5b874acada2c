"""``swift-stage2 bench learning``: whether channel B pays, on scenes whose truth is known, and which objective does.

Every arm starts from the same stage-1 weights and runs the same number of optimizer steps with the same seed and
scenes; what it trains differs (``Treatment``), and the core seconds that this takes, which are told. All checkpoints
are scored by one process on the same held-out scenes.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from benchmarks.altered_rows import noisy_rows
from benchmarks.child_runs import ChildRuns, score, train
from benchmarks.estimates import gain_words, mean_and_range
from benchmarks.results import ResultTable, grouped, publish, say
from swift_stage2.config import MissedOrder, Mode, Objective
from swift_stage2.demo.demo_config import STAGE1, DemoJob
from swift_stage2.demo.grounding_dataset import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.telemetry.summary import summarise

NUM_HELD_OUT = 512
_OFFLINE_DEADLINE_S = 1200.0
SCORES = {
    "F1": "f1",
    "AP": "ap",
    "precision": "precision",
    "recall": "recall",
    "up to 3 objects": "recall_few",
    "4 or more": "recall_many",
    "mean IoU": "mean_iou",
}


class Treatment(StrEnum):
    """The tokens that an arm trains. The first three are of channel A alone."""

    PLAIN = "a"
    """Channel A as it is."""
    NOISE = "noise"
    """Its answers in random order, their boxes moved a little."""
    OFFLINE = "offline"
    """Its answers corrected once, by rollouts of the first model."""
    GIVEN = "given"
    """Corrected targets on channel B; missed objects in this order."""
    READING = "reading"
    RANDOM = "random"
    ANY = "any"
    GRPO = "grpo"
    """Rollouts by their rewards."""
    MIXED = "mixed"

    @property
    def has_b(self) -> bool:
        return self not in (Treatment.PLAIN, Treatment.NOISE, Treatment.OFFLINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArm:
    seed: int
    score: DetectionScore


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningArm(ScoredArm):
    b_ratio: float
    treatment: Treatment
    num_steps: int
    num_b_wanted: int
    num_b_run: int
    train_seconds: float
    """Wall time of rank 0's main thread, from the start of training to its end."""
    core_seconds: float
    """Processor time of all the job's processes, server and start included."""


ArmT = TypeVar("ArmT", bound=ScoredArm)
Columns = Mapping[str, Callable[[Sequence[ArmT]], str]]


def run(options: argparse.Namespace, directory: Path) -> int:
    """Trains every arm and scores all. Raises ChildFailed when a job did not end well."""
    kind = SceneKind(options.kind)
    treatments = [Treatment(arm) for arm in options.arms]
    mode, swift = Mode(options.mode), {"learning_rate": options.learning_rate}
    planned = [
        (treatment, replace(job, swift=swift, mode=mode if treatment.has_b else job.mode))
        for treatment, job in plan_jobs(
            directory, options.steps, options.seeds, options.b_ratios, kind, treatments
        )
    ]
    nothing: Mapping[str, str] = {}
    named = [(job, _name(job.b_ratio, treatment), nothing) for treatment, job in planned]
    with ChildRuns() as children:
        for treatment, job in planned:
            _write_rows(children, treatment, job)
    start, scores, core_seconds = train_and_score(directory, named)
    arms = [
        _arm(treatment, job, result, seconds)
        for (treatment, job), result, seconds in zip(planned, scores, core_seconds, strict=True)
    ]
    facts = {
        "kind": kind,
        "mode": options.mode,
        "learning_rate": options.learning_rate,
        "stage1": asdict(start),
        "arms": [asdict(arm) for arm in arms],
    }
    publish(directory, "learning", facts, learning_table(start, arms), *notes(arms))
    return 0


def plan_jobs(
    directory: Path,
    num_steps: int,
    num_seeds: int,
    b_ratios: Sequence[float],
    kind: SceneKind,
    treatments: Sequence[Treatment] = (Treatment.GIVEN,),
) -> Iterator[tuple[Treatment, DemoJob]]:
    """One job per seed, b_ratio and treatment that fits it, seeds outermost; with b_ratio 0 also channel A as it is."""
    of_a = [Treatment.PLAIN, *(each for each in treatments if not each.has_b and each is not Treatment.PLAIN)]
    of_b = [each for each in treatments if each.has_b]
    for seed in range(num_seeds):
        base = first_job(directory, num_steps, seed, max(b_ratios), kind)
        for b_ratio in b_ratios:
            for treatment in of_b if b_ratio else of_a:
                place = base.directory / f"b{b_ratio:g}-{treatment}"
                yield treatment, _treated(replace(base, directory=place, b_ratio=b_ratio), treatment)


def _treated(job: DemoJob, treatment: Treatment) -> DemoJob:
    match treatment:
        case Treatment.GRPO | Treatment.MIXED:
            return replace(job, objective=Objective(treatment.value))
        case Treatment.NOISE | Treatment.OFFLINE:
            return replace(job, rows=job.directory / "rows.jsonl")
        case Treatment.PLAIN:
            return job
        case _:
            return replace(job, missed_order=MissedOrder(treatment.value))


def _write_rows(children: ChildRuns, treatment: Treatment, job: DemoJob) -> None:
    """Those of an arm whose answers differ from the scenes'."""
    scenes = job.directory.parent / "train" / "rows.jsonl"
    if treatment is Treatment.NOISE:
        job.directory.mkdir(parents=True, exist_ok=True)
        job.rows.write_text(noisy_rows(scenes, job.seed), encoding="utf-8")
    elif treatment is Treatment.OFFLINE:
        say(f"seed {job.seed}: the first model answers every scene")
        files = (str(scenes), str(job.rows), str(job.model))
        children.run(
            "offline",
            (sys.executable, "-m", "benchmarks.altered_rows", *files),
            log_dir=job.directory / "logs",
            deadline_s=_OFFLINE_DEADLINE_S,
        )


def learning_table(start: DetectionScore, arms: Sequence[LearningArm]) -> ResultTable:
    groups = grouped(arms, lambda arm: _name(arm.b_ratio, arm.treatment))
    reference = next(iter(groups))
    run: Columns[LearningArm] = {
        "arm": lambda group: _name(group[0].b_ratio, group[0].treatment),
        "B steps run": lambda group: (
            f"{sum(arm.num_b_run for arm in group)} of {sum(arm.num_b_wanted for arm in group)}"
        ),
    }
    over = f"F1 over {reference} of the same seed"
    took: Columns[LearningArm] = {
        "training, s": lambda group: mean_and_range([arm.train_seconds for arm in group], ".0f"),
        "core, s": lambda group: mean_and_range([arm.core_seconds for arm in group], ".0f"),
    }
    return score_table(arms[0].num_steps, start, groups.values(), groups[reference], run, over, took)


def notes(arms: Sequence[LearningArm]) -> list[str]:
    steps, seeds = arms[0].num_steps, len({arm.seed for arm in arms})
    common = f"swift-stage2 bench learning --steps {steps} --seeds {seeds}"
    return [
        f"To compare objectives: {common} --arms noise offline given any grpo mixed",
        f"To ask it of real digits: {common} --b-ratios 0,0.1,0.3 --kind digits",
        f"To ask it of half of all steps: {common} --b-ratios 0,0.5",
    ]


def _name(b_ratio: float, treatment: Treatment) -> str:
    if treatment.has_b:
        return f"b_ratio {b_ratio:g}, {treatment}"
    return "A only" if treatment is Treatment.PLAIN else f"A only, {treatment}"


def _arm(treatment: Treatment, job: DemoJob, result: DetectionScore, core_seconds: float) -> LearningArm:
    summary = summarise(job.run_dir)
    return LearningArm(
        b_ratio=job.b_ratio,
        treatment=treatment,
        seed=job.seed,
        num_steps=summary.num_steps,
        num_b_wanted=summary.num_b_wanted,
        num_b_run=summary.num_b_run,
        train_seconds=summary.activity[0].wall_s,
        core_seconds=core_seconds,
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
) -> tuple[DetectionScore, list[DetectionScore], list[float]]:
    """Trains jobs, each with its name and environment; scores stage 1 and all of them on seed 0's held-out scenes.

    Returns stage 1's score, the jobs' scores, and the processor seconds of each.

    Raises:
        ChildFailed: a job did not end well.
    """
    core_seconds = []
    with ChildRuns() as children:
        for job, name, environment in arms:
            say(f"training seed {job.seed}: {name}")
            before = _seconds_of_children()
            train(children, job, environment=environment)
            core_seconds.append(_seconds_of_children() - before)
        say("scoring every checkpoint on the same held-out scenes")
        held_out = directory / "seed0" / "held_out" / "rows.jsonl"
        checkpoints = (STAGE1, *(job.checkpoint for job, _, _ in arms))
        start, *scores = score(children, held_out, directory / "scores.json", checkpoints)
    return start, scores, core_seconds


def _seconds_of_children() -> float:
    """Of all that have ended and were waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
        cells += ["" if group is reference else gain_words(gains, "+.3f")]
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
