"""Ends this process with status 70 when a part of a sync round outlasts its limit, whatever the main thread does.

A round keeps its deadlines on the main thread. That thread can itself be stuck: in a gather that a failed rank never
joined, or in a call to a device on which a transfer hangs. Both let go of Python's lock, so that another thread can
still log every stack and leave. Owned by the round; every rank has one.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from swift_stage2.process.background_call import BackgroundCall
from swift_stage2.process.thread_stacks import thread_stacks

logger = logging.getLogger(__name__)

EXIT_HANG = 70
_TICK_S = 0.5
_LAST_WORDS_S = 10.0  # logs may be on a disk that hangs as well


class RoundWatch:
    """Counts from ``begin`` to the next one, or to the end of the context, in which it must be called.

    What is counted are waits of its own: a process that was stopped meanwhile has not spent its time. ``on_hang``
    gets what did not end, and returns what else is known of it; ``leave`` ends the process.
    """

    def __init__(
        self, limit_s: float, on_hang: Callable[[str], str], leave: Callable[[int], object] = os._exit
    ) -> None:
        self._num_ticks = math.ceil(limit_s / _TICK_S)
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._leave = leave
        self._ended = threading.Event()

    def __enter__(self) -> RoundWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def begin(self, what: str) -> None:
        """``what`` has the whole limit from now on; what was watched before has ended."""
        self._ended.set()
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(what, self._ended), name="round-watch", daemon=True).start()

    def _run(self, what: str, ended: threading.Event) -> None:
        for _ in range(self._num_ticks):
            if ended.wait(_TICK_S):
                return
        BackgroundCall(lambda: self._tell(what), "the last words of a round that hangs").ended_within(
            _LAST_WORDS_S
        )
        self._leave(EXIT_HANG)

    def _tell(self, what: str) -> None:
        hang = f"{what} did not end within {self._limit_s:g} s"
        logger.error("a sync round hung and cannot be taken back: %s\n%s", hang, thread_stacks())
        logger.error("a sync round hung and cannot be taken back: %s", self._on_hang(hang))
        for handler in logging.getLogger().handlers:
            handler.flush()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
