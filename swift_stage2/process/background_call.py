"""One call on a daemon thread, for what may block longer than any time limit it takes.

PyTorch's TCPStore is such: its limit ends a wait for a key, but a store whose process is frozen, with the
connection open, is waited for without end. Used by the weight transports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class BackgroundCall(Generic[ResultT]):
    """``work`` on a thread of its own, from now on. A call that never ends keeps its thread and what it uses."""

    def __init__(self, work: Callable[[], ResultT], name: str) -> None:
        self._work = work
        self._name = name
        self._results: list[ResultT] = []
        self._error: Exception | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def ended_within(self, timeout_s: float) -> bool:
        """Waits for the end at most so long, and says whether it came."""
        return self._ended.wait(timeout_s)

    def result_within(self, timeout_s: float) -> ResultT:
        """What ``work`` returned.

        Raises:
            RuntimeError: it has not ended within ``timeout_s``.
            Exception: what ``work`` raised.
        """
        if not self.ended_within(timeout_s):
            raise RuntimeError(f"{self._name} did not end within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:  # top of a thread: handed to whoever waits
            self._error = error
        finally:
            self._ended.set()
