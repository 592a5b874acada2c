"""Files in one directory through which the bench tells ranks and servers which fault to commit, and hears of it.

A switch is a small text that appears whole or not at all. Used by the bench's process, by the learner's plugin
and by the server that can spoil its load.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.whole_file import write_whole

VARIABLE = "SWIFT_STAGE2_FAULT_SWITCHES"

# --- names, and who reads them ------------------------------------------------------------------
PUSH = "push"  # learner: what its transport does to the weights of a round, a ``PushFault``
PUSH_HELD = "push_held"  # bench: the second bucket waits
PUSH_RELEASED = "push_released"  # learner: let it go
SLOW_DISK = "slow_disk"  # learner: seconds that every write of its audit and ledger takes longer
INSTALL = "install"  # our server: an ``InstallFault``
INSTALL_SEEN = "install_seen"  # bench: the one that its engine commits now

_POLL_S = 0.02


class Switches:
    """The switches of one job or one server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def from_environment(cls) -> Switches:
        """As the bench passed them on. Raises UserError outside the bench."""
        path = os.environ.get(VARIABLE)
        if not path:
            raise UserError(f"{VARIABLE} must name a directory, got none; swift-stage2 bench faults sets it")
        return cls(Path(path))

    def set(self, name: str, text: str = "on") -> None:
        """Turns a switch on."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self.directory / name, text)

    def clear(self, *names: str) -> None:
        """Turns switches off; those that are off stay so."""
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def clear_all(self) -> None:
        """Turns every switch off."""
        self.clear(*(path.name for path in self.directory.glob("*")))

    def read(self, name: str) -> str:
        """The text of a switch; empty when it is off."""
        try:
            return (self.directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def wait(self, name: str, timeout_s: float) -> bool:
        """Waits until a switch is on; False when it was not in time."""
        end = time.monotonic() + timeout_s
        while not self.read(name):
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True
