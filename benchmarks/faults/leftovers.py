"""Trees of processes: killed, stopped for a while, and outlived by processes or ports of theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from swift_stage2.runtime.network import is_free

_POLL_S = 0.1


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it; empty when it has gone."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


def command_line(process: psutil.Process) -> list[str]:
    """Empty when it has gone."""
    with suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


class Held:
    """All that a tree held and that may outlive it, as far as it was looked at."""

    def __init__(self) -> None:
        self.processes: list[psutil.Process] = []

    def look(self, processes: list[psutil.Process]) -> None:
        """Takes in processes that are there now."""
        self.processes += [process for process in processes if process not in self.processes]

    def left(self, ports: Sequence[int] = (), patience_s: float = 10.0) -> tuple[str, ...]:
        """Waits up to ``patience_s`` until nothing is left, ports included, and names what is."""
        end = time.monotonic() + patience_s
        while True:
            left = [name for process in self.processes if (name := _name_if_alive(process))]
            left += [f"port {port}" for port in ports if not is_free("127.0.0.1", port)]
            if not left or time.monotonic() >= end:
                return tuple(left)
            time.sleep(_POLL_S)


def kill_all(find: Callable[[], list[psutil.Process]], deadline_s: float) -> list[psutil.Process]:
    """SIGKILL to whatever ``find`` names until it names nothing; returns what did not end in time."""
    end = time.monotonic() + deadline_s
    while (alive := find()) and time.monotonic() < end:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)
    return alive


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """SIGSTOP for the length of a block and SIGCONT after it, also when the block raises."""
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _name_if_alive(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return str(process.name())
    return ""
