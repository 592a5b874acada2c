"""A disk that is slow on demand: what a learner's audit and ledger write takes longer while a switch is on."""

from __future__ import annotations

import os
import time

from benchmarks.faults.switches import SLOW_DISK, Switches

LONGEST_WRITE_S = 0.2


class SlowDisk:
    """``write`` is ``os.write``, after the wait that the switch asks for."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def write(self, descriptor: int, data: bytes) -> int:
        """Waits at most ``LONGEST_WRITE_S``; returns the number of bytes written."""
        if seconds := self._switches.read(SLOW_DISK):
            time.sleep(min(float(seconds), LONGEST_WRITE_S))
        return os.write(descriptor, data)
