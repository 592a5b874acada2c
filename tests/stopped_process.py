"""A process that stands still: SIGSTOP returns before it does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_STANDS_BY_S = 60.0
_STOPPED = "T"


def stop_process(pid: int) -> None:
    """Stops it and waits until none of its threads runs any more: until then it may still answer.

    Raises:
        TimeoutError: a thread runs on.
    """
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + _STANDS_BY_S
    while running := [task for task in Path(f"/proc/{pid}/task").iterdir() if _state(task) != _STOPPED]:
        if time.monotonic() >= end:
            raise TimeoutError(
                f"pid={pid} must stand still within {_STANDS_BY_S:g} s, {len(running)} threads run"
            )
        time.sleep(0.001)  # bounded polling of a state


def _state(task: Path) -> str:
    """The letter of ``/proc/PID/task/TID/stat``, after the command's name in brackets; a thread that is gone stands."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return _STOPPED
