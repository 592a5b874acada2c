"""The ``replay`` command: a recorded run in, a verdict out.

It starts as many ranks as the run had, on this machine. Under its torchrun it is one of the ranks.
Exit status: 0 every loss is bit-equal, 1 one is not or a rank failed, 2 there is nothing to replay.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swift_stage2.compat import ENVIRONMENT_NAMES, installed_versions
from swift_stage2.errors import UserError
from swift_stage2.launch.launcher import run_plan
from swift_stage2.launch.plan import EXIT_STATUS_FILE, LaunchPlan, torchrun_command, without_rank
from swift_stage2.launch.rank import as_rank, end_left_in
from swift_stage2.replay.recorded_run import RecordedRun, read_run, read_verdict
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.runtime.run_directory import make_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Replays and returns the exit status.

    Raises:
        UserError: there is nothing to replay, or no place for what it writes.
    """
    options = _parser().parse_args(argv)
    run_dir = options.run_dir.absolute()
    output = (options.output or options.run_dir / "replay").absolute()
    if run_dir.resolve().is_relative_to(output.resolve()):
        raise UserError("--output must not hold the run itself", got=output, remedy="name another directory")
    if "RANK" in os.environ:
        return as_rank("replay", lambda: _be_rank(run_dir, output))
    return _start_ranks(read_run(run_dir), output)


def _be_rank(run_dir: Path, output: Path) -> int:
    from swift_stage2.replay.rank import replay_rank  # loads ms-swift

    rank = int(os.environ["RANK"])
    verdict = replay_rank(read_run(run_dir), output, rank=rank)
    if rank == 0:
        verdict.write(output)
    return 0 if verdict.is_equal else 1


def _start_ranks(recorded: RecordedRun, output: Path) -> int:
    make_directory(output, keep=False)
    logs = output / "logs"
    status_file = logs / "replay.exit_status"
    outer = {name: text for name, text in without_rank(os.environ).items() if name not in ENVIRONMENT_NAMES}
    learner = torchrun_command(
        "replay",
        ["replay", str(recorded.directory), "--output", str(output)],
        num_ranks=recorded.world_size,
        shutdown_timeout_s=recorded.config["launch"]["learner"]["shutdown_timeout_s"],
        environment={
            **outer,
            **recorded.surroundings["environment"],
            "PYTHONUNBUFFERED": "1",
            EXIT_STATUS_FILE: str(status_file),
        },
    )
    plan = LaunchPlan(servers=(), learner=learner, log_dir=logs, exit_status_file=status_file)
    _say(
        f"steps {recorded.first_step} to {recorded.last_step} of {recorded.directory}, {recorded.world_size} ranks; "
        f"logs in {logs}"
    )
    _warn_of_packages(recorded)
    status = run_plan(plan, 0.0, _show, verbose=False)
    verdict = read_verdict(output)
    if verdict is None:
        _, cause = end_left_in(status_file) or (status, "")
        _say(f"no verdict: the ranks ended with status {status}{cause and f', {cause}'}; see {logs}")
        return status or 1
    _say(verdict.sentence)
    return status if verdict.is_equal else 1


def _warn_of_packages(recorded: RecordedRun) -> None:
    before = recorded.surroundings["versions"]
    if (now := installed_versions()) != before:
        _say(f"warning: the run had other packages: {before}, now {now}")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="swift-stage2 replay",
        exit_statuses="0 every loss is bit-equal; 1 one is not, or a rank failed",
        description="Takes the steps of a recorded run again, without servers, and compares every loss bit by bit.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="output directory of a run with telemetry.record: true"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="gets logs and verdict, no checkpoint (default RUN_DIR/replay); an earlier replay there is replaced",
    )
    return parser


def _say(text: str) -> None:
    _show(f"[replay] {text}")


def _show(line: str) -> None:
    """A closed terminal or pipe ends the show, not the replay."""
    with suppress(OSError):
        print(line, flush=True)
