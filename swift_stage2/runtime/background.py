"""Threads beside the main one: calls that may block past every limit, failures told by the next step, hung rounds.

The main thread, which keeps a round's deadlines, can itself be stuck in a gather that a failed rank never joined, or in
a call to a device. Both release the GIL, so another thread can log every stack and leave (``RoundWatch``).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from swift_stage2.errors import WeightSyncHang

EXIT_HANG = 70

_TICK_S = 0.5
_CLEAN_UP_S = 45.0  # closing a run may take 30 s for its pipeline alone
_LAST_WORDS_S = 10.0  # logs may be on a disk that hangs as well

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class BackgroundCall(Generic[ResultT]):
    """``work`` on a daemon thread of its own, from now on; one that never ends keeps its thread and what it uses.

    For calls whose own time limit does not hold: PyTorch's TCPStore waits without end for a store whose process is
    frozen with the connection open.
    """

    def __init__(self, work: Callable[[], ResultT], name: str) -> None:
        self._name = name
        self._future: Future[ResultT] = Future()
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def ended_within(self, timeout_s: float) -> bool:
        """Waits for the end at most so long, and says whether it came."""
        return bool(wait([self._future], timeout_s).done)

    def result_within(self, timeout_s: float) -> ResultT:
        """The result of ``work``.

        Raises:
            RuntimeError: it has not ended within ``timeout_s``.
            Exception: what ``work`` raised.
        """
        if not self.ended_within(timeout_s):
            raise RuntimeError(f"{self._name} did not end within {timeout_s:.1f} s")
        return self._future.result(0)

    def _run(self, work: Callable[[], ResultT]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # top of a thread: handed to whoever waits
            self._future.set_exception(error)


class BackgroundFailures:
    """One sentence for each failure that was not told before; the learner's next step takes and tells them.

    While it watches, any exception that ends a thread of this process is noted as well, so that no background work
    stops in silence. Owned by the learner; ``note`` may come from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: list[str] = []
        self._known: set[str] = set()
        self._hook_before: Callable[[Any], Any] | None = None

    def watch(self) -> None:
        """From now on until ``stop`` the end of any thread by an exception is noted. May be called again."""
        if self._hook_before is None:
            self._hook_before, threading.excepthook = threading.excepthook, self._on_uncaught

    def stop(self) -> None:
        """Gives Python's hook back. May be called again, and without ``watch``."""
        if self._hook_before is not None:
            threading.excepthook, self._hook_before = self._hook_before, None

    def note(self, thread: str, error: BaseException) -> None:
        text = f"the background thread {thread!r} failed: {type(error).__name__}: {error}"
        if self.tell(text):
            logger.error("%s", text, exc_info=error)

    def tell(self, text: str) -> bool:
        """Notes a sentence of its own; False if it was noted before."""
        with self._lock:
            if text in self._known:
                return False
            self._known.add(text)
            self._news.append(text)
            return True

    def take(self) -> tuple[str, ...]:
        """The failures noted since the last call."""
        with self._lock:
            news, self._news = tuple(self._news), []
            return news

    def _on_uncaught(self, args: Any) -> None:
        self.note(args.thread.name if args.thread else "unknown", args.exc_value or args.exc_type())
        if self._hook_before is not None:
            self._hook_before(args)


@dataclass(frozen=True, slots=True)
class CurrentActivity:
    """What a thread is at; replaced by another whenever it goes on to the next thing."""

    what: str
    """Who does what, as a sentence without its end."""
    since_s: float = field(default_factory=time.monotonic)


def thread_stacks() -> str:
    """The stack of every thread, innermost call last, under its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@contextmanager
def hung_round_ends_process() -> Iterator[None]:
    """A ``WeightSyncHang`` is logged, and ends this process with status 70 after 45 s, however far its clean-up is."""
    try:
        yield
    except WeightSyncHang as hang:
        # Told here, and with an end of its own: what follows is clean-up of others beside a thread that is stuck.
        logger.error("a round hung and cannot be taken back: %s", hang)
        timer = threading.Timer(_CLEAN_UP_S, os._exit, (EXIT_HANG,))
        timer.daemon = True
        timer.start()
        raise


class RoundWatch:
    """Counts from ``begin`` to the next one, or to the end of a context of it.

    It counts waits of its own: a process that was stopped meanwhile has not spent its time. ``on_hang``
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

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def begin(self, what: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """``what`` has the whole limit from now on, or until it ``is_over``; what was watched before has ended."""
        self._ended.set()
        ended = self._ended = threading.Event()
        threading.Thread(
            target=self._run, args=(what, ended, is_over), name="round-watch", daemon=True
        ).start()

    def _run(self, what: str, ended: threading.Event, is_over: Callable[[], bool]) -> None:
        for _ in range(self._num_ticks):
            if ended.wait(_TICK_S) or is_over():
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
