"""Records who did what when: closed intervals of every thread, for a trace that Perfetto can show.

Off, a span is one shared object that does nothing. On, it is two clock reads and an append to a bounded
buffer that forgets its oldest entries. Times are Unix time, as each rank's machine has it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swift_stage2.whole_file import write_whole

logger = logging.getLogger(__name__)

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

    def __init__(
        self,
        enabled: bool,
        *,
        capacity: int = DEFAULT_CAPACITY,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.enabled = enabled
        self.now_ns = now_ns
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._unix_offset_ns = time.time_ns() - now_ns()

    def span(self, name: str) -> AbstractContextManager[None]:
        """A block to be recorded under ``name``, also when it raises."""
        return self._open_span(name) if self.enabled else _NOTHING

    @contextmanager
    def _open_span(self, name: str) -> Iterator[None]:
        start_ns = self.now_ns()
        try:
            yield
        finally:
            self.record(name, start_ns, self.now_ns())

    def record(self, name: str, start_ns: int, end_ns: int, track: str | None = None) -> None:
        """Record an interval that the caller measured, by default on this thread's track."""
        if not self.enabled:
            return
        span = Span(name, track or threading.current_thread().name, start_ns, end_ns)
        with self._lock:
            self._spans.append(span)

    def recorder_of(self, track: str) -> Callable[[str, int, int], None]:
        return partial(self.record, track=track)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The buffer's intervals, in the order in which the intervals ended."""
        with self._lock:
            return tuple(self._spans)

    def chrome_trace(self, rank: int) -> dict[str, Any]:
        """The spans in Chrome's trace format: a process per rank, a track per thread, microseconds of Unix time."""
        spans = self.spans
        tracks = {name: index for index, name in enumerate(dict.fromkeys(span.track for span in spans))}
        names = [_metadata("process_name", rank, 0, f"rank {rank}")]
        names += [_metadata("thread_name", rank, index, name) for name, index in tracks.items()]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "pid": rank,
                "tid": tracks[span.track],
                "ts": (span.start_ns + self._unix_offset_ns) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
            }
            for span in spans
        ]
        return {"traceEvents": names + events}

    def save(self, path: Path, rank: int) -> None:
        """Write the Chrome trace to ``path``, whole or not at all."""
        if not self.enabled:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(self.chrome_trace(rank)))
        except OSError as error:
            logger.warning("no trace: %s: %s", path, error)


def _metadata(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
