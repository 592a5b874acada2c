"""Work on threads that nobody waits for: calls that may block past every limit, and failures told by the next step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

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
