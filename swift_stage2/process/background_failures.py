"""Failures on threads that nobody waits for, kept until the learner's next step tells them.

While it watches, whatever ends any thread of this process without being caught is noted here as well, so that no
background work can stop in silence. Owned by the learner; ``note`` may come from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class BackgroundFailures:
    """One sentence for each failure that was not told before."""

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
        """``error`` happened on the thread of that name."""
        text = f"the background thread {thread!r} failed: {type(error).__name__}: {error}"
        with self._lock:
            if text in self._known:
                return
            self._known.add(text)
            self._news.append(text)
        logger.error("%s", text, exc_info=error)

    def take(self) -> tuple[str, ...]:
        """The failures noted since the last call."""
        with self._lock:
            news, self._news = tuple(self._news), []
            return news

    def _on_uncaught(self, args: Any) -> None:
        self.note(args.thread.name if args.thread else "unknown", args.exc_value or args.exc_type())
        if self._hook_before is not None:
            self._hook_before(args)
