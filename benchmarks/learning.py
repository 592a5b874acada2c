"""``swift-stage2 bench learning``: whether channel B pays, on scenes whose truth is known.

Every arm starts from the same stage-1 weights and runs the same number of optimizer steps with the same seed and
data; only ``b_ratio`` differs. All checkpoints are scored by one process on the same held-out scenes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.faults.bench_options import refuse_below
from benchmarks.results import ResultTable, publish
from benchmarks.spread import mean_and_range
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import STAGE1, DemoJob, free_ports, write_config
from swift_stage2.demo.detection_score import DetectionScore
from swift_stage2.demo.scene_files import SceneFiles, num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.training import score, train
from swift_stage2.errors import UserError
from swift_stage2.output_directory import claim_directory
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.summary import summarise

DEFAULT_STEPS = 200
NUM_HELD_OUT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One trained job and how it scored."""

    b_ratio: float
    seed: int
    num_steps: int
    num_b_wanted: int
    num_b_run: int
    train_seconds: float
    """Wall time of rank 0's main thread, from the start of training to its end."""
    score: DetectionScore


def main(argv: Sequence[str] | None = None) -> int:
    """Trains every arm, scores all, prints a table and writes ``learning.json`` and ``learning.md``.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
        ChildFailed: a job did not end well.
    """
    arguments = _parse(argv)
    directory = claim_directory(arguments.output, keep=arguments.keep)
    with ChildRuns() as children:
        jobs = [
            _train_arm(children, job)
            for job in plan_jobs(
                directory, arguments.steps, arguments.seeds, arguments.b_ratios, arguments.kind
            )
        ]
        _say("scoring every checkpoint on the same held-out scenes")
        held_out = directory / "seed0" / "held_out" / "rows.jsonl"
        start, *scores = score(
            children, held_out, directory / "scores.json", (STAGE1, *(job.checkpoint for job in jobs))
        )
    arms = [_arm(job, result) for job, result in zip(jobs, scores, strict=True)]
    facts = {"kind": arguments.kind, "stage1": asdict(start), "arms": [asdict(arm) for arm in arms]}
    publish(directory, "learning", facts, [learning_table(start, arms)], notes(arms))
    return 0


def plan_jobs(
    directory: Path, num_steps: int, num_seeds: int, b_ratios: Sequence[float], kind: SceneKind
) -> Iterator[DemoJob]:
    """One job per seed and b_ratio, seeds outermost; the scenes of a seed are written before its first job."""
    for seed in range(num_seeds):
        scenes: SceneFiles | None = None
        for b_ratio in b_ratios:
            job = DemoJob(
                directory=directory / f"seed{seed}" / f"b{b_ratio:g}",
                rows=Path(),
                num_steps=num_steps,
                b_ratio=b_ratio,
                seed=seed,
            )
            if scenes is None:
                scenes = write_scenes(
                    job.directory.parent,
                    kind,
                    num_train=num_train_samples(job),
                    num_held_out=NUM_HELD_OUT,
                    seed=seed,
                )
            yield replace(job, rows=scenes.train)


def learning_table(start: DetectionScore, arms: Sequence[Arm]) -> ResultTable:
    """One row per b_ratio: means over seeds, with the range where there are several."""
    num_seeds = len({arm.seed for arm in arms})
    rows = [("stage 1, before", "", "", *_scores([start]), "")]
    for b_ratio in dict.fromkeys(arm.b_ratio for arm in arms):
        group = [arm for arm in arms if arm.b_ratio == b_ratio]
        run = f"{sum(arm.num_b_run for arm in group)} of {sum(arm.num_b_wanted for arm in group)}"
        gains = gains_over_first(arms, b_ratio)
        rows.append(
            (
                f"{b_ratio:g}",
                run,
                mean_and_range(gains, "+.3f") if gains else "",
                *_scores([arm.score for arm in group]),
                mean_and_range([arm.train_seconds for arm in group], ".0f"),
            )
        )
    first = f"{arms[0].b_ratio:g}"
    return ResultTable(
        f"Held-out detection after {arms[0].num_steps} steps, {start.num_images} scenes, {num_seeds} seed(s): "
        "mean (lowest..highest)",
        (
            "b_ratio", "B steps run", f"F1 over b_ratio {first} of the same seed", "F1", "precision", "recall",
            "mean IoU", "training, s",
        ),
        tuple(rows),
    )  # fmt: skip


def gains_over_first(arms: Sequence[Arm], b_ratio: float) -> list[float]:
    """F1 of an arm less that of the first b_ratio, seed by seed; empty for the first itself."""
    first = {arm.seed: arm.score.f1 for arm in arms if arm.b_ratio == arms[0].b_ratio}
    if b_ratio == arms[0].b_ratio:
        return []
    return [arm.score.f1 - first[arm.seed] for arm in arms if arm.b_ratio == b_ratio]


def notes(arms: Sequence[Arm]) -> list[str]:
    """What else may be asked."""
    steps, seeds = arms[0].num_steps, len({arm.seed for arm in arms})
    common = f"swift-stage2 bench learning --steps {steps} --seeds {seeds}"
    return [
        f"To ask it of real digits: {common} --b-ratios 0,0.1,0.3 --kind digits",
        f"To ask it of half of all steps: {common} --b-ratios 0,0.5",
    ]


def _scores(scores: Sequence[DetectionScore]) -> tuple[str, ...]:
    names = ("f1", "precision", "recall", "mean_iou")
    return tuple(mean_and_range([getattr(score, name) for score in scores], ".3f") for name in names)


def _train_arm(children: ChildRuns, job: DemoJob) -> DemoJob:
    _say(f"training seed {job.seed} with b_ratio {job.b_ratio:g}")
    ports = free_ports(2)
    write_config(job, (ports[0], ports[1]))
    train(children, job, LiveView(sys.stdout, plain_every_steps=50))
    return job


def _arm(job: DemoJob, result: DetectionScore) -> Arm:
    summary = summarise(job.run_dir)
    return Arm(
        b_ratio=job.b_ratio,
        seed=job.seed,
        num_steps=summary.num_steps,
        num_b_wanted=summary.num_b_wanted,
        num_b_run=summary.num_b_run,
        train_seconds=summary.activity[0].wall_s,
        score=result,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench learning",
        description="A alone against a share of B. Takes roughly 2 minutes per arm and seed on two cores. Exit "
        "status 0: everything was trained and scored.",
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps (default %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, … (default %(default)s)")
    parser.add_argument(
        "--b-ratios", type=_ratios, default=(0.0, 0.3), metavar="R,R,…", help="arms (default 0,0.3)"
    )
    parser.add_argument("--kind", type=SceneKind, choices=list(SceneKind), default=SceneKind.SHAPES)
    parser.add_argument("--output", type=Path, default=Path("runs/bench-learning"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    arguments = parser.parse_args(argv)
    refuse_below("steps", arguments.steps, 1, DEFAULT_STEPS)
    refuse_below("seeds", arguments.seeds, 1, 1)
    return arguments


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"--b-ratios must be numbers with commas between, got {text!r}; write 0,0.3"
        ) from None
    if not all(0 <= ratio <= 1 for ratio in ratios) or len(set(ratios)) != len(ratios):
        raise UserError(f"--b-ratios must be different numbers in the range 0..1, got {text!r}; write 0,0.3")
    return ratios


def _say(text: str) -> None:
    print(f"[bench] {text}", flush=True)
