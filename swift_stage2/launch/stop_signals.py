"""SIGTERM, SIGINT and SIGHUP into a state that the main thread reads and can wait for."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """While entered, the three signals are only recorded. Main thread only.

    Attributes:
        received: number of the first signal, None until there is one.
        wants_haste: whether a second one came.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.wants_haste = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self, timeout_s: float, also: Sequence[int] = ()) -> None:
        """Returns when a signal came, a descriptor of ``also`` became readable, or the time is over."""
        ready, _, _ = select.select([self._read_end, *also], [], [], max(0.0, timeout_s))
        if self._read_end in ready:
            os.read(self._read_end, 4096)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        else:
            self.wants_haste = True
