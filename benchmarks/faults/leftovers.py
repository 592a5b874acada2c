"""What a process tree holds that can outlive it: processes, listening ports, named shared memory.

Shared memory is attributed to a tree by what its processes have mapped, because other programs on the machine
make segments of the same names. Called by the bench after every row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swift_stage2.demo.demo_config import held_ports

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was still there when everything should have gone; names only."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()

    @property
    def num(self) -> int:
        """All of it."""
        return len(self.processes) + len(self.ports) + len(self.shared_memory)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it; empty when it has gone."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def look(
    processes: Sequence[psutil.Process], ports: Sequence[int], shared_memory: Iterable[str], patience_s: float
) -> Leftovers:
    """Waits up to ``patience_s`` until nothing is left, and says what is."""
    end = time.monotonic() + patience_s
    while True:
        left = Leftovers(
            tuple(_name(process) for process in processes if _is_alive(process)),
            tuple(held_ports(tuple(ports))),
            tuple(sorted(name for name in shared_memory if Path(name).exists())),
        )
        if left.num == 0 or time.monotonic() >= end:
            return left
        time.sleep(_POLL_S)


def kill_all(find: Callable[[], list[psutil.Process]], deadline_s: float) -> list[psutil.Process]:
    """SIGKILL to whatever ``find`` names until it names nothing; returns what did not end in time."""
    end = time.monotonic() + deadline_s
    while (alive := find()) and time.monotonic() < end:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=0.5)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return "?"
