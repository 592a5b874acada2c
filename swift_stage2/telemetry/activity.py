"""Splits the main thread's life into closed intervals, each spent on exactly one activity.

One interval ends where the next begins, in integer nanoseconds, so that the activities add up to wall time
exactly. The learner's main thread switches; any thread may read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from swift_stage2.standing import Standing

NANOSECONDS = 1_000_000_000


class Activity(StrEnum):
    """What the main thread does."""

    BUSY = "busy"
    """Forward, backward, optimizer, and the bookkeeping around them."""
    WAITING = "waiting"
    """For data or for other ranks."""
    SYNCING = "syncing"
    """In a sync round."""
    EVALUATING = "evaluating"
    SAVING = "saving"
    OTHER = "other"
    """Start, shutdown, and what nothing else claims."""


_OF_ANY_LENGTH = (Activity.EVALUATING, Activity.OTHER)


class ActivityClock:
    """Exactly one activity at every moment, from construction on; it starts in ``OTHER``."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._total_ns = dict.fromkeys(Activity, 0)
        self._current = Activity.OTHER
        self._since_ns = self._started_ns = now_ns()
        self.standing: Standing | None = None
        """What the main thread is at; None in activities that nobody can call too long."""

    @property
    def wall_ns(self) -> int:
        """Wall time up to the last switch or reading: one subtraction, not the sum of the activities."""
        with self._lock:
            return self._since_ns - self._started_ns

    @property
    def current(self) -> Activity:
        """What the main thread does now."""
        return self._current

    def switch(self, activity: Activity | str) -> Activity:
        """End the current interval and begin the next; return the activity that ended.

        Raises:
            ValueError: ``activity`` is none of ``Activity``.
        """
        following = Activity(activity)
        with self._lock:
            self._close_interval()
            ended, self._current = self._current, following
            self.standing = (
                None if following in _OF_ANY_LENGTH else Standing(f"the main thread is {following}")
            )
        return ended

    @contextmanager
    def activity(self, activity: Activity | str) -> Iterator[None]:
        """Switch for the length of a block, then back to the outer activity, also when the block raises."""
        outer = self.switch(activity)
        try:
            yield
        finally:
            self.switch(outer)

    def totals_ns(self) -> dict[Activity, int]:
        """Nanoseconds per activity until now. Their sum is the wall time exactly."""
        with self._lock:
            self._close_interval()
            return dict(self._total_ns)

    def seconds(self) -> dict[Activity, float]:
        """``totals_ns`` in seconds."""
        return {activity: total / NANOSECONDS for activity, total in self.totals_ns().items()}

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps; time between two processes of a run belongs to no activity."""
        return {str(activity): total for activity, total in self.totals_ns().items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Add the time of the processes before this one."""
        with self._lock:
            for activity in Activity:
                self._total_ns[activity] += state.get(activity, 0)
                self._started_ns -= state.get(activity, 0)

    def _close_interval(self) -> None:
        now = self._now_ns()
        self._total_ns[self._current] += now - self._since_ns
        self._since_ns = now
