"""Runs commands one after another and leaves no process behind, whatever way it ends.

A thin use of the launcher's ``Job``: every command runs under a warden that also ends it when this process is
killed. Called by the demo and the benches, on the main thread.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from swift_stage2.errors import ChildFailed
from swift_stage2.launch.descendants import adopt_orphans
from swift_stage2.launch.job import Job
from swift_stage2.launch.process_tree import Command
from swift_stage2.launch.stop_signals import StopSignals

_GRACE_S = 90.0  # the launcher itself may need as long to end servers and ranks in order
_SOURCE_PREFIX = re.compile(r"^(?:\[[\w-]+\] )*(?:\[rank\d+\]: ?)?")
_OWN_ERROR = re.compile(r"swift-stage2(?: \w+)*: error: ")
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b")


class ChildRuns:
    """Owns every process that a demo or a bench starts. SIGINT, SIGTERM and SIGHUP end them all."""

    def __init__(self, show: Callable[[str], None] = lambda line: None) -> None:
        """``show`` gets every line that a child writes, with its name in brackets before it."""
        self._show = show
        self._signals = StopSignals()

    def __enter__(self) -> ChildRuns:
        adopt_orphans()
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)

    def run(
        self,
        name: str,
        argv: tuple[str, ...],
        *,
        log_dir: Path,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        each_moment: Callable[[], object] = lambda: None,
    ) -> None:
        """Waits for one command to end well, and ends what it leaves behind.

        ``environment`` is added to this process's. The log is ``log_dir/name.log``.

        Raises:
            ChildFailed: it ended with another status than 0, or not by its deadline; names cause and log.
            KeyboardInterrupt: a signal asked for the end.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        whole = {**os.environ, **(environment or {})}
        end = time.monotonic() + deadline_s
        with Job(log_dir, self._signals, self._show) as job:
            tree = job.start(Command(name=name, argv=argv, environment=whole, grace_s=_GRACE_S))
            while (status := tree.poll()) is None:
                job.step()
                each_moment()
                if self._signals.received is not None:
                    raise KeyboardInterrupt
                if time.monotonic() >= end:
                    raise ChildFailed(
                        f"{name} must end within {deadline_s:.0f} s, it did not; see {tree.log_path}"
                    )
        each_moment()
        if status != 0:
            cause = last_cause(tree.log_path)
            raise ChildFailed(f"{name} ended with status {status}: {cause}; see {tree.log_path}")


def last_cause(log_path: Path) -> str:
    """The line of a log that says best why its process failed."""
    try:
        text = log_path.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        return f"its log cannot be read ({exc})"
    lines = [_SOURCE_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    for pattern in (_OWN_ERROR, _RAISED):
        for line in lines:  # the first failure is the cause, later ones follow from it
            if pattern.match(line):
                return line
    return lines[-1] if lines else "it wrote nothing"


def remaining_children() -> list[str]:
    """Processes below this one that are still there, by number and name."""
    return [f"{child.pid} ({_name(child)})" for child in psutil.Process().children(recursive=True)]


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"
