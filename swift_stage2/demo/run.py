"""``swift-stage2 demo``: the main job on one machine without a GPU, shown while it runs and judged at its end.

Writes data and a YAML, starts ``swift-stage2 launch`` with it (two ranks beside a rollout server), follows the
ranks' audits, scores the checkpoint before and after, and checks that nothing is left running.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from swift_stage2.demo.child_runs import ChildRuns, remaining_children
from swift_stage2.demo.demo_config import (
    CHILD_ENVIRONMENT,
    STAGE1,
    DemoJob,
    free_ports,
    held_ports,
    write_config,
)
from swift_stage2.demo.detection_score import DetectionScore
from swift_stage2.demo.evaluation import evaluation_command, read_scores
from swift_stage2.demo.grounding_dataset import write_dataset
from swift_stage2.demo.progress import RunProgress
from swift_stage2.demo.scenes import SceneKind, Split
from swift_stage2.demo.summary_view import DemoOutcome, outcome_view, problems_of
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.summary import summarise

DEFAULT_STEPS = 120
NUM_HELD_OUT = 128
_MAX_TRAIN_SAMPLES = 4096
_START_DEADLINE_S = 300.0
_DEADLINE_PER_STEP_S = 10.0
_EVALUATION_DEADLINE_S = 300.0
_MARKER = ".swift-stage2-demo"
_FAILED = 1
_LAUNCHER = "[launch] [launch] "


@dataclass(frozen=True, slots=True)
class SceneFiles:
    """The two data sets of a job: paths of their JSONL."""

    train: Path
    held_out: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0 when channel B ran at 80 % of its wanted steps or more and everything ended cleanly, else 1.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
    """
    arguments = _parse(argv)
    started = time.monotonic()
    directory = claim_directory(arguments.output, keep=arguments.keep)
    _say(f"writing scenes and configuration to {directory}")
    job = DemoJob(
        directory=directory,
        rows=directory / "train" / "rows.jsonl",
        num_steps=arguments.steps,
        b_ratio=arguments.b_ratio,
        seed=arguments.seed,
    )
    ports = free_ports(2)
    write_config(job, (ports[0], ports[1]))
    scenes = write_scenes(directory, arguments.kind, num_train=num_train_samples(job), seed=arguments.seed)
    try:
        with ChildRuns(directory / "logs", _show_launcher) as children:
            train(children, job, LiveView(sys.stdout))
            _say("scoring the stage-1 checkpoint and the new one on held-out scenes")
            before, after = score(
                children, scenes.held_out, directory / "scores.json", (STAGE1, job.checkpoint)
            )
    except ChildFailed as error:
        print(f"swift-stage2 demo: {error}", file=sys.stderr)
        return _FAILED
    outcome = DemoOutcome(
        summary=summarise(job.run_dir / "audit"),
        before=before,
        after=after,
        num_steps_wanted=job.num_steps,
        left_processes=tuple(remaining_children()),
        held_ports=tuple(held_ports(ports)),
    )
    Console().print(outcome_view(outcome))
    _say(f"took {time.monotonic() - started:.0f} s; configuration, logs and checkpoint are in {directory}")
    return _FAILED if problems_of(outcome) else 0


def claim_directory(path: Path, *, keep: bool) -> Path:
    """An empty directory for one demo: ``path``, or with ``keep`` the first free ``path-N``.

    Raises:
        UserError: the directory holds something that no demo wrote, or cannot be written.
    """
    directory, number = path, 1
    while keep and directory.exists():
        number += 1
        directory = path.with_name(f"{path.name}-{number}")
    try:
        if directory.exists() and any(directory.iterdir()):
            if not (directory / _MARKER).exists():
                raise UserError(
                    f"--output must be a new directory or an earlier demo's, got {directory} with other files; "
                    "name another one"
                )
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _MARKER).touch()
    except OSError as error:
        raise UserError(
            f"--output must be a directory that can be written, got {directory}: {error}"
        ) from error
    return directory.absolute()


def num_train_samples(job: DemoJob) -> int:
    """Enough for channel A to see few scenes twice, and not more than it reads."""
    return min(_MAX_TRAIN_SAMPLES, job.num_steps * job.samples_per_step)


def write_scenes(directory: Path, kind: SceneKind, *, num_train: int, seed: int) -> SceneFiles:
    """Writes training and held-out scenes below ``directory``. Held-out scenes are the same for every seed.

    Raises:
        UserError: the scenes need a package that is not installed, or cannot be written.
    """
    if kind is SceneKind.DIGITS and importlib.util.find_spec("sklearn") is None:
        raise UserError(
            "--kind digits needs scikit-learn, which is not installed; install swift-stage2[demo]"
        )
    try:
        return SceneFiles(
            train=write_dataset(directory / "train", kind, num_train, Split.TRAIN, seed),
            held_out=write_dataset(directory / "held_out", kind, NUM_HELD_OUT, Split.HELD_OUT, 0),
        )
    except OSError as error:
        raise UserError(f"scenes cannot be written to {directory}: {error}") from error


def train(children: ChildRuns, job: DemoJob, view: LiveView) -> None:
    """Runs ``swift-stage2 launch`` to its end and shows how far it is.

    Raises:
        ChildFailed: it did not end well.
    """
    progress = RunProgress(job.run_dir, job.num_ranks, job.num_steps, b_enabled=job.b_ratio > 0)

    def show() -> None:
        state = progress.refresh()
        if state.step:
            view.update(state)

    command = (sys.executable, "-m", "swift_stage2", "launch", str(job.config_path))
    deadline_s = _START_DEADLINE_S + _DEADLINE_PER_STEP_S * job.num_steps
    try:
        children.run(
            "launch", command, deadline_s=deadline_s, environment=CHILD_ENVIRONMENT, each_moment=show
        )
    finally:
        view.close()


def score(
    children: ChildRuns, held_out: Path, out: Path, checkpoints: Sequence[Path]
) -> tuple[DetectionScore, ...]:
    """Scores checkpoints in one process, all cores, alike.

    Raises:
        ChildFailed: it did not end well.
    """
    environment = {name: value for name, value in CHILD_ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    command = evaluation_command(held_out, out, checkpoints)
    deadline_s = _EVALUATION_DEADLINE_S * len(checkpoints)
    children.run("evaluation", command, deadline_s=deadline_s, environment=environment)
    return read_scores(out)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="swift-stage2 demo", description="Train a tiny model on both channels, on this machine."
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps (default %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="gets data, YAML, logs and checkpoint (default %(default)s); an earlier demo there is replaced",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep an earlier demo; take DIR-2, DIR-3, … instead"
    )
    parser.add_argument(
        "--b-ratio", type=float, default=0.3, help="share of steps on channel B (default %(default)s)"
    )
    parser.add_argument("--kind", type=SceneKind, choices=list(SceneKind), default=SceneKind.SHAPES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    for name, least in (("steps", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise UserError(f"--{name} must be at least {least}, got {name}={value}")
    return arguments


def _show_launcher(line: str) -> None:
    """The launcher's own words; what servers and ranks say is in the log."""
    if line.startswith(_LAUNCHER):
        _say(line.removeprefix(_LAUNCHER))


def _say(text: str) -> None:
    print(f"[demo] {text}", flush=True)
