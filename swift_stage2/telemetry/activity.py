"""What the main thread and the pipeline's thread do at every moment: the two actors whose time a run accounts for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from swift_stage2.process.watches import Standing
from swift_stage2.telemetry.interval_clock import NANOSECONDS, IntervalClock, OnClosed

__all__ = ["NANOSECONDS", "Activity", "ActivityClock", "PipelineActivity"]


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


class PipelineActivity(StrEnum):
    """What the pipeline's thread does."""

    IDLE = "idle"
    """Nothing: the pacer wants no pack now, or no server may be asked."""
    READING = "reading"
    """Rows and images."""
    ASKING = "asking"
    """A server works on a POST of this rank."""
    TICKET = "ticket"
    """It has something to ask and no POST is out: the fence is closed, or a lane settles an abandoned POST."""
    PREPARING = "preparing"
    """Parse, match, target, encode."""
    PACKING = "packing"
    EVALUATING = "evaluating"
    """All of an evaluation's part, its POSTs included."""


_OF_ANY_LENGTH = (Activity.EVALUATING, Activity.OTHER)


class ActivityClock(IntervalClock[Activity]):
    """The main thread's, which alone switches it; it starts in ``OTHER``."""

    def __init__(
        self, now_ns: Callable[[], int] = time.perf_counter_ns, on_closed: OnClosed | None = None
    ) -> None:
        super().__init__(Activity.OTHER, now_ns, on_closed)
        self.standing: Standing | None = None
        """What the main thread is at; None in activities that nobody can call too long."""

    def switch(self, activity: Activity | str) -> Activity:
        """As every clock does.

        Raises:
            ValueError: ``activity`` is none of ``Activity``.
        """
        following = Activity(activity)
        ended = super().switch(following)
        self.standing = None if following in _OF_ANY_LENGTH else Standing(f"the main thread is {following}")
        return ended

    @contextmanager
    def activity(self, activity: Activity | str) -> Iterator[None]:
        """Switch for the length of a block, then back to the outer activity, also when the block raises."""
        outer = self.switch(activity)
        try:
            yield
        finally:
            self.switch(outer)
