"""The ``rollouts`` command: a line for each finished rollout of a run, with ``--follow`` for as long as it goes on.

A rollout is finished when it has been matched: the event ``matched`` tells of it, once, and ``sent`` named its server
before. Its text stands in ``completion``, which a recording has of all, or in the ``match`` of a few rows. Only logs
are read, each from where the last look ended, and nothing in the run waits for a reader.

Exit status: 0 every rank told its end, or the run goes on and is not followed; 1 it does not, and a rank told no end or
its log is damaged; 2 there is no such run.
"""

from __future__ import annotations

import argparse
import heapq
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.records import match_ratios
from swift_stage2.runtime.output import say
from swift_stage2.runtime.parser import CommandParser
from swift_stage2.runtime.run_directory import is_held
from swift_stage2.telemetry.event_log import EventTail, log_paths, no_log
from swift_stage2.telemetry.events import (
    Damaged,
    End,
    Key,
    Match,
    Matched,
    Place,
    Quarantined,
    RecordedCompletion,
    Returned,
    Sent,
    Start,
)


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """One rollout, as the log of its rank tells of it."""

    rank: int
    start: Start
    """Of the process that asked for it."""
    key: Key
    matched: Matched
    server: str | None
    """That answered, or the merger in front of it; None where the log does not tell."""
    text: str | None
    """The answer; None where it was not recorded."""

    @property
    def group(self) -> str | None:
        """Rank, epoch and number of the group that it is compared with; None in a run without groups."""
        size = self.start.state.num_generations if self.start.state is not None else 1
        return f"{self.rank}:{self.key[0]}:{self.key[1] // size}" if size > 1 else None

    @property
    def fields(self) -> dict[str, Any]:
        """Its line of JSON. ``rollout`` is its name, of which a run has no second one; ``version`` is the oldest that
        any of its tokens was sampled under; ``false`` and ``missed`` are predictions and truth without a partner;
        ``similarity`` is the task's word for what ``mean_iou`` is a mean of.
        """
        (epoch, position, row, attempt), quality = self.key, self.matched.quality
        counts = {name: getattr(quality, name) for name in _COUNTS}
        return {
            "rollout": f"{self.start.run_id}:{self.rank}:{epoch}:{position}:{attempt}",
            "time": self.matched.time,
            "run_id": self.start.run_id,
            "rank": self.rank,
            "version": self.matched.version,
            "epoch": epoch,
            "position": position,
            "row": row,
            **({} if self.group is None else {"group": self.group}),
            "attempt": attempt,
            "server": self.server,
            "num_tokens": self.matched.num_rollout_tokens,
            "truncated": bool(quality.num_truncated),
            "pairs": quality.num_pairs,
            "false": quality.num_predictions - quality.num_pairs,
            "missed": quality.num_ground_truth - quality.num_pairs,
            "mean_iou": match_ratios(**counts).get("mean_iou"),
            "similarity": self.start.similarity,
            "dropped": quality.dropped,
            "reward": quality.reward,
            "text": self.text,
        }

    @property
    def line(self) -> str:
        """The rollout in a line to read, no wider than a terminal where it is written on one."""
        told, (epoch, position, row, attempt) = self.fields, self.key
        iou = "" if told["mean_iou"] is None else f", {told['similarity']} {told['mean_iou']:.2f}"
        dropped, reward = sum(told["dropped"].values()), told["reward"].get("total")
        parts = [
            time.strftime("%H:%M:%S", time.localtime(self.matched.time)),
            f"rank {self.rank}",
            f"v{self.matched.version:<4}",
            f"{epoch}:{position}:{row}".ljust(11),
            *([f"group {self.group}"] if self.group is not None else ()),
            f"attempt {attempt}",
            self.server or "server unknown",
            f"{told['num_tokens']:>4} tokens{', truncated' if told['truncated'] else ''}",
            f"{told['pairs']} matched, {told['false']} false, {told['missed']} missed{iou}"
            + (f", {dropped} dropped" if dropped else "")
            + (f", reward {reward:.2f}" if reward is not None else ""),
        ]
        if self.text is not None:  # a model's words: nothing that a terminal would obey
            parts.append(repr(self.text[:_MOST_CHARACTERS]) + "…" * (len(self.text) > _MOST_CHARACTERS))
        line = "  ".join(parts)
        return line[: shutil.get_terminal_size().columns] if sys.stdout.isatty() else line


class RunRollouts:
    """The finished rollouts of one run, read on and on."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._ranks: dict[int, _RankRollouts] = {}

    def read(self) -> Iterator[FinishedRollout]:
        """Those that have become known since the last call, by time; to be read to its end.

        Raises:
            UserError: the run has no channel B.
        """
        for rank, path in log_paths(self._run_dir).items():
            self._ranks.setdefault(rank, _RankRollouts(self._run_dir, rank, path))
        return heapq.merge(
            *(each.read() for each in self._ranks.values()), key=lambda each: each.matched.time
        )

    @property
    def doubts(self) -> Sequence[str]:
        """Why rollouts of a run that no process works on may be missing; empty if none is."""
        starts = [each.start for each in self._ranks.values() if each.start is not None]
        newest = max(starts, key=lambda start: start.time, default=None)
        found = []
        for rank in sorted({*range(newest.world_size if newest is not None else 1), *self._ranks}):
            told = self._ranks.get(rank)
            if told is None or newest is None or told.ended != newest.run_id:
                found.append(f"rank {rank} told no end: it was killed, or a full disk took no more")
            if told is not None and told.num_damaged:
                found.append(f"rank {rank}: {told.num_damaged} lines of its log are damaged")
        return found


class _RankRollouts:
    def __init__(self, run_dir: Path, rank: int, path: Path) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._tail = EventTail(path)
        self._servers: dict[Place, str] = {}  # of samples in hand
        self._texts: dict[Key, str] = {}
        self.start: Start | None = None
        """Of its last process."""
        self.ended: str | None = None
        """The run of its last process, once that came to its orderly end."""
        self.num_damaged = 0

    def read(self) -> Iterator[FinishedRollout]:
        for event in self._tail.read():
            match event:
                case Start(queue_limit=None):
                    raise UserError(
                        "rollouts are read from a run with channel B",
                        got=f"{self._run_dir}, whose run has none",
                        remedy="name the directory of another run, or set stage2_ab.schedule.b_ratio above 0",
                    )
                case Start():
                    self.start, self.ended = event, None
                    self._servers.clear()
                    self._texts.clear()
                case End() if self.start is not None:
                    self.ended = self.start.run_id
                case Damaged():
                    self.num_damaged += 1
                case Sent():
                    self._servers.update({key[:2]: event.server for key in event.samples})
                case Returned() | Quarantined():
                    for key in event.samples:
                        self._servers.pop(key[:2], None)
                        self._texts.pop(key, None)
                case RecordedCompletion():
                    self._texts[event.sample] = event.text
                case Match():
                    self._texts[event.sample] = event.rollout
                case Matched() if self.start is not None:
                    for key in event.samples:
                        server, text = self._servers.pop(key[:2], None), self._texts.pop(key, None)
                        yield FinishedRollout(self._rank, self.start, key, event, server, text)


_LOOK_S = 0.5
_COUNTS = ("num_predictions", "num_ground_truth", "num_pairs", "sum_iou")
_MOST_CHARACTERS = 120  # of an answer in a line to read


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rollouts and returns the exit status.

    Raises:
        UserError: there is no such run, or its files or the output cannot be used.
    """
    options = _parser().parse_args(argv)
    rollouts, num_told = RunRollouts(options.run_dir), 0
    goes_on, has_waited = is_held(options.run_dir), False
    while not log_paths(options.run_dir):
        if not (goes_on and options.follow):
            raise no_log(options.run_dir)
        if not has_waited:
            _say(f"waits for the first rollouts of the run in {options.run_dir}")
        time.sleep(_LOOK_S)  # bounded polling: the run's processes end
        goes_on, has_waited = is_held(options.run_dir), True
    while True:
        for rollout in rollouts.read():
            say(json.dumps(rollout.fields) if options.json else rollout.line)
            num_told += 1
        if not (goes_on and options.follow):
            break
        time.sleep(_LOOK_S)
        goes_on = is_held(
            options.run_dir
        )  # asked first: whatever a process wrote before its end is read then
    if goes_on:
        return 0
    for doubt in rollouts.doubts:
        _say(f"warning: {doubt}")
    if options.follow:
        end = "and may lack some" if rollouts.doubts else "on every rank"
        _say(f"the run has ended {end}: {num_told} rollouts")
    return 1 if rollouts.doubts else 0


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
