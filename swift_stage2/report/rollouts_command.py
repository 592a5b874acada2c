"""The ``rollouts`` command: a line for each finished rollout of a run, with ``--follow`` for as long as it goes on.

Only files of the run directory are read, and nothing in it waits for a reader. Exit status: 0 every rank told its end,
or the run goes on and is not followed; 1 it does not, and a rank told no end or its log is damaged; 2 there is
no such run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_stage2.report.finished_rollouts import FinishedRollout, RunRollouts
from swift_stage2.run_directory.lock import is_held
from swift_stage2.terminal.output import needs_stdout, say
from swift_stage2.terminal.parser import CommandParser

EXIT_WHOLE = 0
EXIT_NOT_WHOLE = 1
_LOOK_S = 0.5
_MOST_CHARACTERS = 120  # of an answer in a line to read


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rollouts and returns the exit status.

    Raises:
        UserError: there is no such run, or its files or the output cannot be used.
    """
    options = _parser().parse_args(argv)
    rollouts, num_told, has_waited = RunRollouts(options.run_dir), 0, False
    while True:
        # Asked first: whatever a process wrote before its end is found below.
        goes_on = is_held(options.run_dir)
        rollouts.require_begun(may_come=goes_on and options.follow)
        if not (rollouts.has_begun or has_waited):
            _say(f"waits for the first rollouts of the run in {options.run_dir}")
            has_waited = True
        with needs_stdout("a rollout's line"):
            for rollout in rollouts.read():
                say(json.dumps(json_of(rollout)) if options.json else line_of(rollout))
                num_told += 1
        if not (goes_on and options.follow):
            break
        time.sleep(_LOOK_S)  # bounded polling: the run's processes end
    if goes_on:
        return EXIT_WHOLE
    doubts = rollouts.doubts
    for doubt in doubts:
        _say(f"warning: {doubt}")
    if options.follow:
        _say(f"the run has ended {'and may lack some' if doubts else 'on every rank'}: {num_told} rollouts")
    return EXIT_NOT_WHOLE if doubts else EXIT_WHOLE


def json_of(rollout: FinishedRollout) -> dict[str, Any]:
    """Its fields; ``group`` in a run with groups alone."""
    fields = asdict(rollout)
    if rollout.group is None:
        del fields["group"]
    return fields


def line_of(rollout: FinishedRollout) -> str:
    """The rollout in a line to read, no wider than a terminal where it is written on one."""
    iou = "" if rollout.mean_iou is None else f", {rollout.likeness} {rollout.mean_iou:.2f}"
    dropped = sum(rollout.dropped.values())
    parts = [
        time.strftime("%H:%M:%S", time.localtime(rollout.time)),
        f"rank {rollout.rank}",
        f"v{rollout.version:<4}",
        f"{rollout.epoch}:{rollout.position}:{rollout.row}".ljust(11),
        *([f"group {rollout.group}"] if rollout.group is not None else ()),
        f"attempt {rollout.attempt}",
        rollout.server or "server unknown",
        f"{rollout.num_tokens:>4} tokens{', truncated' if rollout.truncated else ''}",
        f"{rollout.pairs} matched, {rollout.false} false, {rollout.missed} missed{iou}"
        + (f", {dropped} dropped" if dropped else "")
        + (f", reward {rollout.reward['total']:.2f}" if "total" in rollout.reward else ""),
    ]
    if rollout.text is not None:  # a model's words: nothing that a terminal would obey
        parts.append(repr(rollout.text[:_MOST_CHARACTERS]) + "…" * (len(rollout.text) > _MOST_CHARACTERS))
    line = "  ".join(parts)
    return line[: shutil.get_terminal_size().columns] if sys.stdout.isatty() else line


def _say(text: str) -> None:
    say(f"swift-stage2 rollouts: {text}", is_error=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="swift-stage2 rollouts",
        exit_statuses="0 all there is was printed; 1 the run has ended and a rank told no end, or lines are damaged",
        description="Prints a line for each finished rollout of a run: time, rank, version of the weights, sample "
        "(epoch:position:row) and attempt, server, tokens, match with the ground truth, and the answer where it was "
        "recorded. Reads files that the run writes anyway: a run never waits for who reads them.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="the directory that holds the run's events/"
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on with what comes, until no process of the run is left"
    )
    parser.add_argument("--json", action="store_true", help="print each rollout as one line of JSON")
    return parser
