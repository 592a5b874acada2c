"""SIGTERM and SIGINT as a wish to stop, which all ranks then agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from swift_stage2.runtime.worker import workers_heed_no_stop


class StopOnSignal:
    """A context in which either signal calls ``ask_to_stop``; a second SIGINT ends the process at once.

    Data-loader workers that start in it hear neither. Does nothing on another thread than the main one.
    """

    def __init__(self, ask_to_stop: Callable[[], None]) -> None:
        self._ask_to_stop = ask_to_stop
        self._before: dict[int, Any] = {}
        self._workers = ExitStack()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._workers.enter_context(workers_heed_no_stop())
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was set from C
        self._workers.close()

    def _on_signal(self, number: int, frame: Any) -> None:
        self._ask_to_stop()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT] or signal.default_int_handler)
