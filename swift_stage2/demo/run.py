"""``swift-stage2 demo``: the main job on one machine without a GPU, shown while it runs and judged at its end.

Writes data and a YAML, launches it (two ranks beside a rollout server), and scores the checkpoint before and after.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from swift_stage2.config import ServerEngine
from swift_stage2.demo.demo_config import (
    CHILD_ENVIRONMENT,
    STAGE1,
    DemoJob,
    evaluation_command,
    server_entry,
    write_config,
)
from swift_stage2.demo.scenes import SceneKind, num_train_samples, write_scenes
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.evaluate.command import PREDICTIONS_FILE
from swift_stage2.evaluate.command import main as evaluate
from swift_stage2.launch.job import Job, last_cause
from swift_stage2.launch.launcher import evaluate_command, launch
from swift_stage2.report.command import main as report
from swift_stage2.runtime.network import free_ports
from swift_stage2.runtime.output import SafeConsole, print_error
from swift_stage2.runtime.parser import CommandParser, whole_number
from swift_stage2.runtime.run_directory import make_directory
from swift_stage2.runtime.supervisor import Command, StopSignals
from swift_stage2.telemetry.summary import RunSummary, summarise

DEFAULT_STEPS = 120
NUM_HELD_OUT = 128
WANTED_B_SHARE = 0.8
_SCORING_DEADLINE_S = 600.0
_SCORING_GRACE_S = 10.0
_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0 when channel B ran at 80 % of its wanted steps or more and everything ended cleanly, else 1, or the status of
        a launch that failed.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
    """
    arguments = _parse(argv)
    started = time.monotonic()
    server_entry(ServerEngine(arguments.engine))  # what is not installed is told before anything is written
    directory = make_directory(arguments.output, keep=arguments.keep)
    _say(f"writing scenes and configuration to {directory}")
    job = DemoJob(
        directory=directory,
        rows=directory / "train" / "rows.jsonl",
        num_steps=arguments.steps,
        b_ratio=arguments.b_ratio,
        seed=arguments.seed,
        engine=ServerEngine(arguments.engine),
        record=arguments.record,
    )
    http_port, group_port = free_ports(2)
    write_config(job, (http_port, group_port))
    scenes = write_scenes(
        directory,
        arguments.kind,
        num_train=num_train_samples(job),
        num_held_out=NUM_HELD_OUT,
        seed=arguments.seed,
    )
    os.environ.update(CHILD_ENVIRONMENT)
    if status := launch(str(job.config_path), show=_show_launcher, verbose=False):
        return status
    if not job.checkpoint.is_dir():
        _say(f"training ended before step {job.num_steps}, so that there is nothing to compare")
        return _FAILED
    _say("evaluating the stage-1 checkpoint (A) and the new one (B) on held-out scenes")
    arms = {"before": STAGE1, "after": job.checkpoint}
    try:
        places = [
            _evaluate(scenes.held_out, checkpoint, directory / name) for name, checkpoint in arms.items()
        ]
    except ChildFailed as error:
        print_error("demo", error)
        return _FAILED
    summary = summarise(job.run_dir)
    problems = problems_of(summary, job.num_steps)
    report([str(job.run_dir)])
    words = ("--data", scenes.held_out, "--compare", *places, "--output", directory / "comparison")
    evaluate(list(map(str, words)))
    for problem in problems:
        SafeConsole().print(Text(f"! {problem}", style="bold red"))
    if not problems:
        _say("everything ran and ended as it should")
    _say(f"took {time.monotonic() - started:.0f} s; configuration, logs and checkpoint are in {directory}")
    _say(f"evaluate it: {evaluate_command(scenes.held_out, job.checkpoint)}")
    return _FAILED if problems else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="swift-stage2 demo", description="Train a tiny model on both channels, on this machine."
    )
    add = parser.add_argument
    add("--steps", type=whole_number(1), default=DEFAULT_STEPS, help="optimizer steps (default %(default)s)")
    output_help = "gets data, YAML, logs and checkpoint; an earlier demo there is replaced"
    add("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help=output_help)
    add("--keep", action="store_true", help="keep an earlier demo; take DIR-2, DIR-3, … instead")
    add("--b-ratio", type=float, default=0.3, help="share of steps on channel B (default %(default)s)")
    add("--kind", type=SceneKind, choices=list(SceneKind), default=SceneKind.SHAPES)
    engines = [engine.value for engine in ServerEngine]
    engine_help = "what serves rollouts: our server on one of two engines, or stock `swift rollout`"
    add("--engine", choices=engines, default=ServerEngine.TRANSFORMERS.value, help=engine_help)
    add("--seed", type=whole_number(0), default=0)
    record_help = "record the run, so that swift-stage2 replay can take it again"
    add("--record", action="store_true", help=record_help)
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.b_ratio <= 1:
        raise UserError(
            "--b-ratio must be in the range 0..1",
            got=f"b_ratio={arguments.b_ratio:g}",
            remedy="0 turns B off",
        )
    return arguments


def _evaluate(held_out: Path, checkpoint: Path, output: Path) -> Path:
    """Runs ``swift-stage2 evaluate`` in a process that ends with this one; returns the file of predictions.

    Raises:
        ChildFailed: it did not end well, or not by its deadline; names cause and log.
        KeyboardInterrupt: a signal asked for the end.
    """
    log_dir, end = output.parent / "logs", time.monotonic() + _SCORING_DEADLINE_S
    log_dir.mkdir(exist_ok=True)
    with StopSignals() as signals, Job(log_dir, signals, lambda line: None) as job:
        argv = evaluation_command(held_out, checkpoint, output)
        tree = job.start(Command(f"evaluation-{output.name}", argv, dict(os.environ), _SCORING_GRACE_S))
        while tree.poll() is None and signals.received is None and time.monotonic() < end:
            job.step()
        status = tree.poll()
    if signals.received is not None:
        raise KeyboardInterrupt
    if status is None:
        raise ChildFailed(f"scoring must end within {_SCORING_DEADLINE_S:.0f} s; see {tree.log_path}")
    if status != 0:
        raise ChildFailed(
            f"scoring ended with status {status}: {last_cause(tree.log_path)}; see {tree.log_path}"
        )
    return output / PREDICTIONS_FILE


def _show_launcher(line: str) -> None:
    _say(line.removeprefix("[launch] "))


def _say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def problems_of(summary: RunSummary, num_steps_wanted: int) -> list[str]:
    """The reasons why a demo is no success, one line each."""
    told = []
    if summary.num_steps != num_steps_wanted:
        told.append(f"{summary.num_steps} of {num_steps_wanted} optimizer steps ran")
    if summary.num_b_run < WANTED_B_SHARE * summary.num_b_wanted:
        wanted = f"{WANTED_B_SHARE:.0%} of {summary.num_b_wanted} wanted"
        told.append(f"channel B must run at {wanted} steps at least, it ran at {summary.num_b_run}")
    for error, count in summary.server_errors.items():
        told.append(f"a server failed {count} sync rounds: {error}")
    return told
