"""Clocks of a learner, which leave their readings in a file; without ms-swift, so that benches can import it.

Of ``read_times``: ``end_ns`` is the moment, ``main_ns`` the calling thread's time on a core, ``others_ns`` that of all
other threads, ``queued_ns`` how long the calling thread was ready to run and had no core. The rest of an interval it
was blocked: by the interpreter's lock, files, sockets.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).parent / "plugins"
THREAD_CLOCK = "stage2_thread_clock"
STEP_CLOCK = "stage2_step_clock"
DIRECTORY_VARIABLE = "SWIFT_STAGE2_BENCH_CLOCK"
"""Names the directory that gets every rank's ``rankN.json``."""
MEETING_VARIABLE = "SWIFT_STAGE2_BENCH_MEETING"
"""A directory and how many ranks of all arms meet there, with a colon between; not set: nobody is waited for."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")

Clock = Mapping[str, Sequence[int]]
"""Nanoseconds at the end of every step, by column."""


def read_times() -> dict[str, int]:
    """Nanoseconds by name, of the calling thread and its process."""
    main_ns = time.thread_time_ns()
    return {
        "end_ns": time.perf_counter_ns(),
        "main_ns": main_ns,
        "others_ns": time.process_time_ns() - main_ns,
        "queued_ns": _queued_ns(),
    }


def read_clock(directory: Path) -> dict[str, list[int]]:
    """The readings that rank 0 left there."""
    clock: dict[str, list[int]] = json.loads((directory / "rank0.json").read_text(encoding="utf-8"))
    return clock


def since(clock: Clock, column: str, num_warmup: int) -> float:
    """Seconds of a column after the warm-up, which is at least one step."""
    return (clock[column][-1] - clock[column][num_warmup - 1]) / 1e9


class ExclusiveTimer:
    """Nanoseconds per owner of nested calls; while an inner call runs, the outer one's time stands still."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._owners: list[str] = []
        self._since_ns = 0
        self.total_ns: dict[str, int] = {}

    def timed(self, owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its own time added to ``owner``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._owners.append(owner)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._owners.pop()

        return call

    def _charge(self) -> None:
        now = self._now_ns()
        if self._owners:
            owner = self._owners[-1]
            self.total_ns[owner] = self.total_ns.get(owner, 0) + now - self._since_ns
        self._since_ns = now


def _queued_ns() -> int:
    """0 on a kernel that does not tell."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
