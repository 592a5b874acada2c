"""Processes below this one, orphans included: adopt them, end them, know that none is left.

A process group is not enough: torchrun gives every rank a session of its own, and an engine's workers
outlive their parent. A process that adopts orphans keeps them all below itself.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 10.0


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"PR_SET_CHILD_SUBREAPER: {os.strerror(number)}")


def end_descendants(patience_s: float, spare: Collection[int] = ()) -> list[int]:
    """SIGTERM to everything below this process, SIGKILL after ``patience_s`` to what is left.

    Children in ``spare``, and what is below them, are left alone. Children that are ended are also reaped.

    Returns:
        Process ids that even SIGKILL did not end within some seconds; normally none.
    """
    alive = _descendants(spare)
    for process in alive:
        _signal(process, kill=False)
    psutil.wait_procs(alive, timeout=patience_s)
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while (alive := _descendants(spare)) and time.monotonic() < deadline:
        for process in alive:
            _signal(process, kill=True)
        psutil.wait_procs(alive, timeout=0.5)
    return [process.pid for process in alive]


def _descendants(spare: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spare:
            continue
        found.append(child)
        try:
            found += child.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
