"""Main memory: how much a process may still take of the machine and of its container, and what the C library keeps.

Every push of weights runs in a thread of its own, and glibc keeps what such threads free in heaps of their own: on the
CPU rank 0 grew by 40 MiB in 2,000 steps. Giving it back took 7 ms there, hence not after every round.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own
_TRIM_EVERY_S = 10.0


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Without swapping; what only caches files counts as available."""
    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):  # no limit: no such file, or the word "max"
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
        caches = int(dict(line.split() for line in lines)["inactive_file"])
        available = min(available, max(0, limit - used + caches))
    return available


class HeapTrim:
    """Gives back what the C library keeps, at most once in ten seconds, and nowhere but on glibc."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._next_s = now_s, now_s() + _TRIM_EVERY_S
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def after_round(self) -> None:
        """A round has ended; the main thread waits for the trim."""
        if self._trim is not None and self._now_s() >= self._next_s:
            self._next_s = self._now_s() + _TRIM_EVERY_S
            self._trim(0)  # how many bytes of a heap's end to keep
