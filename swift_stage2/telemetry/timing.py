"""Where the time goes: the activities of main thread and pipeline thread, and closed intervals of every thread.

A run accounts for the time of those two actors. One interval of an actor ends where the next begins, in integer
nanoseconds, so that its activities add up to wall time exactly.

A trace, for Perfetto, is off or on. Off, a span is one shared object that does nothing. On, it is two clock reads and
an append to a bounded buffer that forgets its oldest entries. Times are Unix time, as each rank's machine has it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from swift_stage2.whole_file import write_whole

logger = logging.getLogger(__name__)

NANOSECONDS = 1_000_000_000

ActivityT = TypeVar("ActivityT", bound=StrEnum)
OnClosed = Callable[[str, int, int], None]


def in_seconds(ns_by_activity: Mapping[str, int] | None) -> dict[str, float]:
    """Seconds by activity; empty without a clock."""
    return {name: ns / NANOSECONDS for name, ns in (ns_by_activity or {}).items()}


class IntervalClock(Generic[ActivityT]):
    """Exactly one activity at every moment, from construction on."""

    def __init__(
        self,
        first: ActivityT,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        on_closed: OnClosed | None = None,
    ) -> None:
        """``first`` is what the actor does until it is told otherwise.

        ``on_closed`` gets every interval that has ended: activity, start and end in nanoseconds of ``now_ns``. It is
        called under the clock's lock, so in order; it must be brief and not come back here.
        """
        self._now_ns = now_ns
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._total_ns: dict[ActivityT, int] = dict.fromkeys(type(first), 0)
        self._current = first
        self._began_ns = self._since_ns = now_ns()

    @property
    def current(self) -> ActivityT:
        return self._current

    def switch(self, activity: ActivityT) -> ActivityT:
        """End the current interval and begin the next; return the activity that ended."""
        with self._lock:
            return self._begin(activity)

    def switch_from(self, ended: ActivityT, activity: ActivityT) -> None:
        """Switch, but only if ``ended`` is what the actor does now."""
        with self._lock:
            if self._current is ended:
                self._begin(activity)

    def end_interval(self) -> None:
        """End the current interval, so that ``on_closed`` gets it too; the actor goes on with what it does."""
        with self._lock:
            self._begin(self._current)

    def state_dict(self) -> dict[str, int]:
        """Nanoseconds per activity until now; time between two processes of a run belongs to none."""
        with self._lock:
            self._count()
            return {str(activity): total for activity, total in self._total_ns.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Add the time of the processes before this one."""
        with self._lock:
            for activity in self._total_ns:
                self._total_ns[activity] += state.get(activity, 0)

    def _begin(self, activity: ActivityT) -> ActivityT:
        self._count()
        if self._on_closed is not None and self._since_ns > self._began_ns:
            self._on_closed(str(self._current), self._began_ns, self._since_ns)
        ended, self._current, self._began_ns = self._current, activity, self._since_ns
        return ended

    def _count(self) -> None:
        now = self._now_ns()
        self._total_ns[self._current] += now - self._since_ns
        self._since_ns = now


class Activity(StrEnum):
    STARTING = "starting"
    """Until the first step: checks, and the wait for servers."""
    BUSY = "busy"
    """Forward, backward, optimizer, and the bookkeeping around them."""
    WAITING = "waiting"
    """For data or for other ranks."""
    SYNCING = "syncing"
    """In a sync round."""
    FILLING = "filling"
    """Until the packs of a phase are made, where servers share the learner's devices."""
    SWITCHING = "switching"
    """The devices go to the servers, or come back once these sleep."""
    EVALUATING = "evaluating"
    SAVING = "saving"
    OTHER = "other"
    """Shutdown, and what nothing else claims."""


class PipelineActivity(StrEnum):
    IDLE = "idle"
    """Nothing: the pacer wants no pack now, or no server may be asked."""
    READING = "reading"
    """Rows and images."""
    ASKING = "asking"
    """A server works on a POST of this rank."""
    TICKET = "ticket"
    """It has something to ask and no POST is out: the fence is closed, or an abandoned POST is settled."""
    PREPARING = "preparing"
    """Parse, match, target, encode."""
    PACKING = "packing"
    EVALUATING = "evaluating"
    """All of an evaluation's part, its POSTs included."""


class ActivityClock(IntervalClock[Activity]):
    """The main thread's, which alone switches it; it starts in ``STARTING``."""

    def __init__(
        self, now_ns: Callable[[], int] = time.perf_counter_ns, on_closed: OnClosed | None = None
    ) -> None:
        super().__init__(Activity.STARTING, now_ns, on_closed)

    def switch(self, activity: Activity | str) -> Activity:
        """As every clock does.

        Raises:
            ValueError: ``activity`` is none of ``Activity``.
        """
        return super().switch(Activity(activity))

    @contextmanager
    def activity(self, activity: Activity | str) -> Iterator[None]:
        """Switch for the length of a block, then back to the outer activity, also when the block raises."""
        outer = self.switch(activity)
        try:
            yield
        finally:
            self.switch(outer)


DEFAULT_CAPACITY = 200_000
_NOTHING = nullcontext()
EnterSpan = Callable[[str], AbstractContextManager[None]]


def untraced(name: str) -> AbstractContextManager[None]:
    """The span of whoever is not traced."""
    return _NOTHING


@dataclass(frozen=True, slots=True)
class Span:
    """One closed interval of one thread, in nanoseconds of ``time.perf_counter_ns``."""

    name: str
    track: str
    """The thread, or the actor whose activities follow each other there."""
    start_ns: int
    end_ns: int


class Trace:
    """One rank's spans. Safe for any number of threads."""

    def __init__(self, enabled: bool, *, capacity: int = DEFAULT_CAPACITY) -> None:
        self.enabled = enabled
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._unix_offset_ns = time.time_ns() - time.perf_counter_ns()

    def span(self, name: str) -> AbstractContextManager[None]:
        """A block to be recorded under ``name``, also when it raises."""
        return self._open_span(name) if self.enabled else _NOTHING

    @contextmanager
    def _open_span(self, name: str) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(name, start_ns, time.perf_counter_ns())

    def record(self, name: str, start_ns: int, end_ns: int, track: str | None = None) -> None:
        """Record an interval that the caller measured, by default on this thread's track."""
        if self.enabled:
            self._spans.append(Span(name, track or threading.current_thread().name, start_ns, end_ns))

    def record_last(self, name: str, seconds: float) -> None:
        """Record what has taken so long until now."""
        end_ns = time.perf_counter_ns()
        self.record(name, end_ns - int(seconds * NANOSECONDS), end_ns)

    def take(self) -> tuple[Span, ...]:
        """The buffer's intervals, in the order in which they ended; it is empty then."""
        return tuple(self._spans.popleft() for _ in range(len(self._spans)))

    def save(self, path: Path, rank: int) -> None:
        """Write them in Chrome's trace format, whole or not at all: a process per rank, a track per thread."""
        if not self.enabled:
            return
        spans = self.take()
        tracks = {name: index for index, name in enumerate(dict.fromkeys(span.track for span in spans))}
        named = [
            ("process_name", 0, f"rank {rank}"),
            *(("thread_name", n, name) for name, n in tracks.items()),
        ]
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}
            for kind, track, name in named
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": rank,
                "tid": tracks[span.track],
                "ts": (span.start_ns + self._unix_offset_ns) / 1000,  # microseconds
                "dur": (span.end_ns - span.start_ns) / 1000,
            }
            for span in spans
        ]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"traceEvents": events}))
        except OSError as error:
            logger.warning("no trace: %s: %s", path, error)
