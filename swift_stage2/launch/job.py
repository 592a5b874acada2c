"""All process trees of one launch: started, followed by their logs, and ended together."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from swift_stage2.runtime.output import SAID
from swift_stage2.runtime.supervisor import Command, ProcessTree, StopSignals, end_descendants

_POLL_S = 0.1
_LONGEST_STRAY_PATIENCE_S = 10.0


class Job:
    """Owns every process that launch starts; on exit none of them is left."""

    def __init__(
        self, log_dir: Path, signals: StopSignals, show: Callable[[str], None], *, shows_logs: bool = True
    ) -> None:
        """``show`` gets the launcher's own lines, and with ``shows_logs`` every line of all logs, else what they tell a
        user: what goes on, a line per logging step, warnings."""
        self._log_dir = log_dir
        self._signals = signals
        self._show = show
        self._shows_logs = shows_logs
        self._spare = frozenset(child.pid for child in psutil.Process().children())
        self._trees: list[ProcessTree] = []
        self._followers: dict[Path, LogFollower] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for tree in reversed(self._trees):  # the learner first: it may be talking to a server
                if tree.end(self._go_on):  # a second signal cuts its grace short
                    self.say(f"{tree.command.name} is killed before it has ended in order")
            self.end_leftovers()
        finally:
            for follower in self._followers.values():
                follower.close()

    def start(self, command: Command, purpose: str = "", *, shows_log: bool = False) -> ProcessTree:
        """Starts one command and follows its log, every line of which a user sees where ``shows_log``; ``purpose`` is
        said instead of its name."""
        log_path = self._log_dir / f"{command.name}.log"
        log_path.touch(0o600)
        if log_path not in self._followers:  # a restarted command goes on in its log
            only = None if self._shows_logs or shows_log else SAID
            self._followers[log_path] = LogFollower(log_path, command.name, self._show, only)
        tree = ProcessTree(command, log_path)
        self._trees.append(tree)
        self.say(f"{purpose or f'started {command.name}'}, log {log_path.name}")
        return tree

    def end_leftovers(self) -> None:
        """Ends what supervisors that were killed have left of their trees, and nothing of a tree that runs."""
        patience_s = 0.0 if self._signals.wants_haste else _LONGEST_STRAY_PATIENCE_S
        running = {tree.pid for tree in self._trees if tree.poll() is None}
        if left := end_descendants(patience_s, spare=self._spare | running):
            self.say(f"processes that SIGKILL did not end: {left}")

    def step(self) -> None:
        """Waits a moment or for a signal, and shows what was logged meanwhile."""
        self._signals.wait(_POLL_S)
        for follower in self._followers.values():
            follower.pump()

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self._show(f"[launch] {text}")

    def _go_on(self) -> bool:
        self.step()
        return not self._signals.wants_haste


_REDRAW_INTERVAL_S = 1.0
_LINE_END = re.compile(rb"(\r\n|[\r\n])")


class LogFollower:
    """Shows what is appended to one file. A progress bar redraws itself after ``\\r``: one state a second is shown."""

    def __init__(
        self, path: Path, name: str, show: Callable[[str], None], only: re.Pattern[str] | None = None
    ) -> None:
        """``only``: of every line in which it is found its first group, and no other line."""
        self._name, self._show, self._only = name, show, only
        self._redrawn_at = -_REDRAW_INTERVAL_S
        self._rest = b""
        self._file = path.open("rb")
        self._file.seek(0, 2)

    def pump(self) -> None:
        """Shows every whole line since the last call."""
        *lines, self._rest = _LINE_END.split(self._rest + self._file.read())
        for line, end in zip(lines[::2], lines[1::2], strict=True):
            self._emit(line, is_redrawn=end == b"\r")

    def close(self) -> None:
        """Shows the rest, also without an end of line."""
        self.pump()
        self._emit(self._rest)
        self._file.close()

    def _emit(self, line: bytes, *, is_redrawn: bool = False) -> None:
        text, now = line.decode("utf-8", errors="replace"), time.monotonic()
        if self._only is not None:
            text = found[1] if (found := self._only.search(text)) else ""
        if not text.strip() or (is_redrawn and now - self._redrawn_at < _REDRAW_INTERVAL_S):
            return
        if is_redrawn:
            self._redrawn_at = now
        self._show(f"[{self._name}] {text}")


_SOURCE_PREFIX = re.compile(r"^(?:\[[\w-]+\] )*(?:\[rank\d+\]: ?)?")
_OWN_ERROR = re.compile(r"swift-stage2(?: \w+)*: error: ")
_OURS_RAISED = re.compile(r"^swift_stage2\.errors\.\w+: ")  # says more than what it was raised from
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b")


def last_cause(log_path: Path, offset: int = 0) -> str:
    """``offset``: bytes of earlier processes in the same log."""
    try:
        with log_path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode("utf-8", errors="replace")
    except OSError as exc:
        return f"its log cannot be read ({exc})"
    lines = [_SOURCE_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    for pattern in (_OWN_ERROR, _OURS_RAISED, _RAISED):
        for line in lines:  # the first failure is the cause, later ones follow from it
            if pattern.match(line):
                return line
    return lines[-1] if lines else "it wrote nothing"
