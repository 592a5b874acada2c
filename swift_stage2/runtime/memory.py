"""Main memory: how much a process may still take, files in it that other processes map, what the C library keeps.

Installs of weights and requests run in threads, and glibc keeps what threads free in heaps of their own: a process grew
by 40 MiB in 2,000 pushes. Giving it back took 7 ms there, hence not after every one.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own
_TRIM_EVERY_S = 10.0
MEMORY_PREFIX = "swift-stage2-"
"""A ``MemoryFile`` is named so, and a server maps no other."""


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


class MemoryFile:
    """An anonymous file (memfd_create(2)), mapped for writing, that nobody can cut.

    It has no name in any directory, and ends with whoever has it open or maps it. Processes of its owner's user open it
    through ``/proc/<owner>/fd``.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        """Raises OSError: there is no memory for it, which is told now, not by SIGBUS when it is touched."""
        fd = os.memfd_create(MEMORY_PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._map(fd, num_bytes, is_new=True)

    @classmethod
    def open(cls, path: str) -> MemoryFile:
        """Another process's, at its ``path``. Raises OSError: its owner is gone."""
        self = cls.__new__(cls)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map(fd, os.fstat(fd).st_size)
        return self

    @property
    def path(self) -> str:
        """At which other processes open it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def reopened(self) -> BinaryIO:
        """A descriptor of its own, for who must not meet another file when this one is closed."""
        return os.fdopen(os.dup(self.fd), "rb", buffering=0)

    def close(self) -> None:
        """Nobody opens it here any more; mappings stay. May be called again."""
        self._close()

    def _map(self, fd: int, num_bytes: int, *, is_new: bool = False) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        self._close = weakref.finalize(self, os.close, fd)
        try:
            if is_new:
                os.posix_fallocate(fd, 0, num_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.memory = memoryview(mmap.mmap(fd, num_bytes))
        except BaseException:
            self.close()
            raise


class HeapTrim:
    """Gives back what the C library keeps, at most once in ten seconds, and nowhere but on glibc."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._next_s = now_s, now_s() + _TRIM_EVERY_S
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def after_round(self) -> None:
        """A round has ended; the main thread waits for the trim."""
        if self._now_s() >= self._next_s:
            self._next_s = self._now_s() + _TRIM_EVERY_S
            self.now()

    def now(self) -> None:
        """As ``after_round``, whenever the last time was."""
        if self._trim is not None:
            self._trim(0)  # how many bytes of a heap's end to keep
