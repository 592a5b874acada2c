"""Tells how much main memory a process may still take: of the machine, and of the container it runs in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own


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
