"""Tells where a rank stands when its main thread or its pipeline has been at one thing for too long.

Ends nothing: whatever must end has a deadline of its own. This is for the wait that nobody thought of: the log names
the stage, how long it lasts, and the stack of every thread. Owned by the run; every rank has one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from swift_stage2.process.standing import Standing
from swift_stage2.process.thread_stacks import thread_stacks

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_STOP_TIMEOUT_S = 10.0


class ProgressWatch:
    """``start`` and ``stop`` bound its thread's life. ``who`` maps a thread's name to what it is at, None while idle.

    The same thing is told again after twice the time, and so on. ``on_stall`` gets the sentence and the seconds, on
    the watch's thread; it must not raise.
    """

    def __init__(
        self,
        who: Mapping[str, Callable[[], Standing | None]],
        *,
        limit_s: float,
        on_stall: Callable[[str, float], None],
        tick_s: float = _TICK_S,
    ) -> None:
        self._who = who
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._tick_s = tick_s
        self._told: dict[str, tuple[Standing, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress-watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. May be called again, and without ``start``."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def look(self, now_s: float) -> None:
        """One look at everybody; ``now_s`` as of ``time.monotonic``."""
        for name, where in self._who.items():
            standing = where()
            if standing is None:
                continue
            seconds = now_s - standing.since_s
            told, again_after_s = self._told.get(name, (None, self._limit_s))
            limit_s = again_after_s if told == standing else self._limit_s
            if seconds >= limit_s:
                self._told[name] = (standing, 2 * seconds)
                self._tell(standing, seconds)

    def _run(self) -> None:
        while not self._ended.wait(self._tick_s):
            self.look(time.monotonic())

    def _tell(self, standing: Standing, seconds: float) -> None:
        logger.error("no progress: %s for %.0f s\n%s", standing.what, seconds, thread_stacks())
        self._on_stall(standing.what, seconds)
