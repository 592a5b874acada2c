"""``swift-stage2 bench staleness``: does it matter how old a rollout is when it is trained?

Every arm makes its packs at the same steps from the same stage-1 weights and trains as many B steps; only the versions
between making and training differ. All checkpoints are scored on the same held-out scenes, beside one that trained
channel A alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.delayed_queue import FIRST_VERSION_VARIABLE, LAG_VARIABLE
from benchmarks.faults.bench_options import refuse_below
from benchmarks.learning import NUM_HELD_OUT
from benchmarks.results import ResultTable, publish
from benchmarks.spread import mean_and_range
from benchmarks.thread_times import DIRECTORY_VARIABLE
from swift_stage2.command_parser import CommandParser
from swift_stage2.demo.child_runs import ChildRuns
from swift_stage2.demo.demo_config import STAGE1, DemoJob, free_ports, write_config
from swift_stage2.demo.detection_score import DetectionScore
from swift_stage2.demo.scene_files import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.training import score, train
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.output_directory import claim_directory
from swift_stage2.telemetry.audit import audit_path, read_audit
from swift_stage2.telemetry.live_view import LiveView

_LAGS = (0, 2, 8)
_STEPS = 150
_SEEDS = 3
_B_RATIO = 0.25  # one B step per version of four steps, so that no version has two or none
_PLUGIN = Path(__file__).parent / "delayed_plugin.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleArm:
    """One trained job and how it scored. ``lag`` None is channel A alone."""

    lag: int | None
    seed: int
    num_b_steps: int
    mean_lag: float | None
    """Of the packs that were trained, as the learner saw it."""
    max_lag: int | None
    score: DetectionScore


def main(argv: Sequence[str] | None = None) -> int:
    """Trains every arm, scores all, prints a table and writes ``staleness.json`` and ``staleness.md``.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
        ChildFailed: a job did not end well, or arms trained different numbers of B steps.
    """
    options = _parse(argv)
    directory = claim_directory(options.output, keep=options.keep)
    with ChildRuns() as children:
        jobs = []
        for lag, job in plan_arms(directory, options.steps, options.seeds, options.lags):
            print(f"[bench] seed {job.seed}: {_name(lag)}", flush=True)
            ports = free_ports(2)
            write_config(job, (ports[0], ports[1]))
            train(
                children,
                job,
                LiveView(sys.stdout, plain_every_steps=50),
                environment=_environment(job, lag, max(options.lags)),
            )
            jobs.append((lag, job))
        print("[bench] scoring every checkpoint on the same held-out scenes", flush=True)
        held_out = directory / "seed0" / "held_out" / "rows.jsonl"
        checkpoints = (STAGE1, *(job.checkpoint for _, job in jobs))
        start, *scores = score(children, held_out, directory / "scores.json", checkpoints)
    arms = [_arm(lag, job, result) for (lag, job), result in zip(jobs, scores, strict=True)]
    counts = {arm.num_b_steps for arm in arms if arm.lag is not None}
    facts = {"steps": options.steps, "stage1": asdict(start), "arms": [asdict(arm) for arm in arms]}
    publish(directory, "staleness", facts, [staleness_table(start, arms, options.steps)])
    if len(counts) > 1:
        found = ", ".join(
            f"{_name(arm.lag)} of seed {arm.seed}: {arm.num_b_steps}" for arm in arms if arm.lag is not None
        )
        raise ChildFailed(
            f"arms must train as many B steps to be compared, got {found}; the logs are in {directory}/seed*/*/logs"
        )
    return 0


def plan_arms(
    directory: Path, num_steps: int, num_seeds: int, lags: Sequence[int]
) -> Iterator[tuple[int | None, DemoJob]]:
    """Channel A alone and every lag, for each seed; the scenes of a seed are written before its first job."""
    for seed in range(num_seeds):
        base = DemoJob(
            directory=directory / f"seed{seed}" / "a",
            rows=Path(),
            num_steps=num_steps,
            b_ratio=_B_RATIO,
            seed=seed,
        )
        scenes = write_scenes(
            base.directory.parent,
            SceneKind.SHAPES,
            num_train=num_train_samples(base),
            num_held_out=NUM_HELD_OUT,
            seed=seed,
        )
        base = replace(base, rows=scenes.train)
        yield None, replace(base, b_ratio=0.0)
        for lag in lags:
            yield lag, replace(base, directory=base.directory.parent / f"lag{lag}", plugins=(_PLUGIN,))


def staleness_table(start: DetectionScore, arms: Sequence[StaleArm], num_steps: int) -> ResultTable:
    """One row per lag: means over seeds, with the range where there are several."""
    rows = [
        ("stage 1, before", "", "", "", *(mean_and_range([getattr(start, name)], ".3f") for name in _SCORES))
    ]
    for lag in dict.fromkeys(arm.lag for arm in arms):
        group = [arm for arm in arms if arm.lag == lag]
        lags = [arm.mean_lag for arm in group if arm.mean_lag is not None]
        changes = changes_from_first(arms, lag)
        rows.append(
            (
                _name(lag),
                mean_and_range([arm.num_b_steps for arm in group], ".0f"),
                mean_and_range(lags, ".1f") if lags else "",
                mean_and_range(changes, "+.3f") if changes else "",
                *(mean_and_range([getattr(arm.score, name) for arm in group], ".3f") for name in _SCORES),
            )
        )
    return ResultTable(
        f"Held-out detection after {num_steps} steps, {start.num_images} scenes, "
        f"{len({arm.seed for arm in arms})} seed(s): mean (lowest..highest)",
        (
            "arm",
            "B steps",
            "versions behind",
            "F1 over the first lag of the same seed",
            "F1",
            "precision",
            "recall",
            "mean IoU",
        ),
        tuple(rows),
    )  # fmt: skip


def changes_from_first(arms: Sequence[StaleArm], lag: int | None) -> list[float]:
    """F1 of an arm less that of the first lag, seed by seed; empty for the first lag itself."""
    first_lag = next(arm.lag for arm in arms if arm.lag is not None)
    first = {arm.seed: arm.score.f1 for arm in arms if arm.lag == first_lag}
    return [] if lag == first_lag else [arm.score.f1 - first[arm.seed] for arm in arms if arm.lag == lag]


_SCORES = ("f1", "precision", "recall", "mean_iou")


def _name(lag: int | None) -> str:
    return "A only" if lag is None else f"lag {lag}"


def _environment(job: DemoJob, lag: int | None, longest_lag: int) -> dict[str, str]:
    if lag is None:
        return {}
    # The first round makes version 1; what is made under it has the longest lag so many versions later.
    return {
        LAG_VARIABLE: str(lag),
        FIRST_VERSION_VARIABLE: str(1 + longest_lag),
        DIRECTORY_VARIABLE: str(job.directory),
    }


def _arm(lag: int | None, job: DemoJob, result: DetectionScore) -> StaleArm:
    steps = [r for r in read_audit(audit_path(job.run_dir, 0)) if r["kind"] == "step"]
    trained = [step["version"] - pack["version"] for step in steps for pack in step["packs"]]
    return StaleArm(
        lag=lag,
        seed=job.seed,
        num_b_steps=sum(step["channel"] == "B" for step in steps),
        mean_lag=statistics.fmean(trained) if trained else None,
        max_lag=max(trained, default=None),
        score=result,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 bench staleness",
        description="F1 against the versions between a rollout's making and its training, at equal B steps. Takes "
        "roughly 3 minutes per arm and seed on two cores. Exit status 0: all arms trained as many B steps.",
    )
    parser.add_argument(
        "--steps", type=int, default=_STEPS, help="optimizer steps per arm (default %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=_SEEDS, help="seeds 0, 1, … (default %(default)s)")
    parser.add_argument(
        "--lags", type=_parse_lags, default=_LAGS, metavar="L,L,…", help="versions (default 0,2,8)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/bench-staleness"), metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep earlier results; take DIR-2, … instead")
    options = parser.parse_args(argv)
    refuse_below("seeds", options.seeds, 1, _SEEDS)
    # A version lasts four steps here; an arm that trains no B step says nothing.
    least = 4 * (max(options.lags) + 2)
    if options.steps < least:
        raise UserError(
            f"--steps must be at least {least} for a lag of {max(options.lags)} versions, got {options.steps}; write "
            f"--steps {max(least, _STEPS)}, or smaller --lags"
        )
    return options


def _parse_lags(text: str) -> tuple[int, ...]:
    try:
        lags = tuple(int(part) for part in text.split(","))
    except ValueError:
        lags = ()
    if not lags or min(lags) < 0 or len(set(lags)) != len(lags):
        raise UserError(
            f"--lags must be different whole numbers from 0 on, with commas between, got {text!r}; write 0,2,8"
        )
    return lags
