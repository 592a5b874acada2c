"""Waits for what other threads and processes bring about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONGEST_WAIT_S = 60.0


def wait_for(holds: Callable[[], bool], timeout_s: float = LONGEST_WAIT_S) -> None:
    """Polls until it holds."""
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while not holds():
        assert time.monotonic() < end, "it never happened"
        pause.wait(0.01)
