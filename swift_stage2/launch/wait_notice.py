"""Says now and then that something is still waited for, so that a long start does not look like a hang. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 30.0


class WaitNotice:
    """Counts from its construction."""

    def __init__(
        self,
        say: Callable[[str], object],
        every_s: float = _EVERY_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._now_s = now_s
        self._started = now_s()
        self._next = self._started + every_s

    def remind(self, what: str, limit_s: float | None = None) -> None:
        """Says ``what``, the seconds passed and those there are, if it is time to."""
        now = self._now_s()
        if now < self._next:
            return
        self._next = now + self._every_s
        limit = "" if limit_s is None else f" of {limit_s:g} s"
        self._say(f"{what}, {now - self._started:.0f} s{limit}")
