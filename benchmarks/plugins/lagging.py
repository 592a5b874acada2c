"""ms-swift plugin: the real learner in mode inline, whose channel B is trained with a forced lag.

Whole reservations wait in a line, where freshness does not reach them, and are trained so many versions later.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import Any

from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation

LAG_VARIABLE = "SWIFT_STAGE2_FORCED_LAG"
"""Versions between the making of a pack and its training."""
FIRST_VERSION_VARIABLE = "SWIFT_STAGE2_FIRST_B_VERSION"
"""The first version under which B is trained, that of the longest lag, so that all arms train as many B steps."""


class DelayedQueue(ReadyQueue):
    """Gives what was made ``lag`` versions before, or longer ago if no step wanted any just then."""

    def __init__(self, limit: int, version_window: int, *args: Any) -> None:
        super().__init__(limit, 0, *args)  # what no step took in its version is not taken in the next one
        self._lag = int(os.environ[LAG_VARIABLE])
        self._first_version = int(os.environ[FIRST_VERSION_VARIABLE])
        self._waiting: deque[tuple[int, Reservation]] = deque()

    @property
    def version_window(self) -> int:
        """The learner's last look: what waited here may be trained, however old it is."""
        return sys.maxsize

    def has_room(self, oldest: int) -> bool:
        """Always: what waits here is reserved for long, and no step lacks packs for it."""
        return True

    def reserve(self, n: int, *, current_version: int, min_tokens: int = 0) -> Reservation | None:
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


if LAG_VARIABLE in os.environ:
    from swift_stage2 import Stage2Trainer  # isort: skip, it must be imported before torchvision

    from swift_stage2.learner import parts
    from swift_stage2.training.stage2_trainer import register_trainer

    parts.ReadyQueue = DelayedQueue  # type: ignore[attr-defined, assignment]
    register_trainer(Stage2Trainer)
