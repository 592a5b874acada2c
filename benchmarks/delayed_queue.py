"""A queue whose packs are made when a B step wants some, and trained so many versions later.

Whole reservations wait in a line beside the queue, where freshness does not reach them: to train what is stale is the
point here. The first B step of every arm is that of the arm with the longest lag, so that all train as many.
Put in place by the plugin ``delayed_plugin``.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from benchmarks.inline_pipeline import InlineQueue
from swift_stage2.channel_b.ready_queue import Reservation
from swift_stage2.channel_b.records import Pack

LAG_VARIABLE = "SWIFT_STAGE2_FORCED_LAG"
"""Versions between the making of a pack and its training."""
FIRST_VERSION_VARIABLE = "SWIFT_STAGE2_FIRST_B_VERSION"
"""The first version under which B is trained."""


class DelayedQueue(InlineQueue):
    """Gives what was made ``lag`` versions before, or longer ago if no step wanted any just then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lag = int(os.environ[LAG_VARIABLE])
        self._first_version = int(os.environ[FIRST_VERSION_VARIABLE])
        self._waiting: deque[tuple[int, Reservation[Pack]]] = deque()

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation[Pack] | None:
        if current_version + self._lag < self._first_version:
            return None
        made = super().reserve(n, current_version=current_version, min_tokens=min_tokens)
        if made is None:
            return None
        self._waiting.append((current_version, made))
        version, _ = self._waiting[0]
        if current_version < self._first_version or version > current_version - self._lag:
            return None
        return self._waiting.popleft()[1]
