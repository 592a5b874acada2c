"""Named shared memory of a process tree, which outlives processes that are killed.

Python's and vLLM's segments are unlinked by their own processes on the way out; after SIGKILL nobody does it.
Segments are told apart from other programs' by what the tree has mapped; loky's semaphores, which nobody keeps mapped,
by the process that their names name. Called by wardens and by the bench.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

_DIRECTORY = "/dev/shm/"
_DELETED = " (deleted)"


class SharedMemoryWatch:
    """Remembers the segments that processes had mapped, to remove those that nobody uses any more."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Notes what these processes have mapped now."""
        self.seen |= mapped_by(processes)

    def unlink_abandoned(self) -> list[str]:
        """Removes segments that were seen, still exist, are this user's and are mapped by no process; returns them."""
        candidates = [name for name in sorted(self.seen) if _is_mine(name)]
        if not candidates:
            return []
        used = mapped_by(psutil.process_iter())
        removed = []
        for name in candidates:
            if name in used:
                continue
            try:
                os.unlink(name)
            except OSError:
                continue  # somebody else was quicker
            removed.append(name)
        return removed


def mapped_by(processes: Iterable[psutil.Process]) -> set[str]:
    """Paths below ``/dev/shm`` that these processes have mapped or named after themselves."""
    found: set[str] = set()
    for process in processes:
        found.update(glob.glob(f"{_DIRECTORY}sem.loky-{process.pid}-*"))
        try:
            lines = (
                Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            )
        except OSError:
            continue  # it has ended, or is another user's
        for line in lines:
            _, is_segment, name = line.partition(_DIRECTORY)
            if is_segment and not name.endswith(_DELETED):
                found.add(_DIRECTORY + name)
    return found


def _is_mine(name: str) -> bool:
    try:
        return os.stat(name).st_uid == os.getuid()
    except OSError:
        return False
