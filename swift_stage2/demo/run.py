"""``swift-stage2 demo``: the main job on one machine without a GPU, shown while it runs and judged at its end.

Writes data and a YAML, starts ``swift-stage2 launch`` with it (two ranks beside a rollout server), follows the
ranks' audits, scores the checkpoint before and after, and checks that nothing is left running.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from swift_stage2.config import ServerEngine
from swift_stage2.demo.child_runs import ChildRuns, remaining_children
from swift_stage2.demo.demo_config import STAGE1, DemoJob, free_ports, held_ports, write_config
from swift_stage2.demo.demo_server import server_entry
from swift_stage2.demo.scene_files import num_train_samples, write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.demo.summary_view import DemoOutcome, outcome_view, problems_of
from swift_stage2.demo.training import score, train, words_of_launcher
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.run_directory.output import claim_directory
from swift_stage2.telemetry.live_view import LiveView
from swift_stage2.telemetry.summary import summarise
from swift_stage2.terminal.error_line import print_error
from swift_stage2.terminal.parser import CommandParser

DEFAULT_STEPS = 120
NUM_HELD_OUT = 128
_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0 when channel B ran at 80 % of its wanted steps or more and everything ended cleanly, else 1.

    Raises:
        UserError: an option is out of range, or the output directory cannot be used.
    """
    arguments = _parse(argv)
    started = time.monotonic()
    server_entry(ServerEngine(arguments.engine))  # what is not installed is told before anything is written
    directory = claim_directory(arguments.output, keep=arguments.keep)
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
    ports = free_ports(2)
    write_config(job, (ports[0], ports[1]))
    scenes = write_scenes(
        directory,
        arguments.kind,
        num_train=num_train_samples(job),
        num_held_out=NUM_HELD_OUT,
        seed=arguments.seed,
    )
    try:
        with ChildRuns(_show_launcher) as children:
            train(children, job, LiveView(sys.stdout))
            _say("scoring the stage-1 checkpoint and the new one on held-out scenes")
            before, after = score(
                children, scenes.held_out, directory / "scores.json", (STAGE1, job.checkpoint)
            )
    except ChildFailed as error:
        print_error("demo", error)
        return _FAILED
    outcome = DemoOutcome(
        summary=summarise(job.run_dir),
        before=before,
        after=after,
        num_steps_wanted=job.num_steps,
        left_processes=tuple(remaining_children()),
        held_ports=tuple(held_ports(ports)),
    )
    Console().print(outcome_view(outcome))
    _say(f"took {time.monotonic() - started:.0f} s; configuration, logs and checkpoint are in {directory}")
    _say(f"what it did, as a page: swift-stage2 report {job.run_dir}")
    return _FAILED if problems_of(outcome) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
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
    parser.add_argument(
        "--engine",
        choices=[engine.value for engine in ServerEngine],
        default=ServerEngine.TRANSFORMERS.value,
        help="what serves rollouts: our server on one of two engines, or stock `swift rollout` (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="record the run, so that swift-stage2 replay can take it again"
    )
    arguments = parser.parse_args(argv)
    for name, least in (("steps", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise UserError(f"--{name} must be at least {least}, got {name}={value}")
    if not 0 <= arguments.b_ratio <= 1:
        raise UserError(
            f"--b-ratio must be in the range 0..1, got b_ratio={arguments.b_ratio:g}; 0 turns B off"
        )
    return arguments


def _show_launcher(line: str) -> None:
    """The launcher's own words; what servers and ranks say is in the log."""
    words = words_of_launcher(line)
    if words is not None:
        _say(words)


def _say(text: str) -> None:
    print(f"[demo] {text}", flush=True)
