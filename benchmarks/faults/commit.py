"""Faults are committed inside learner and server by these parts, and the bench tells them which by switches.

A switch is a small text in a file of one directory, which appears whole or not at all. Used by the bench's process, by
the learner's plugin, which gives the learner a disk that fails on demand and the ``courier`` of this folder, and by
``python -m benchmarks.faults.commit``, which takes the options of ``swift-stage2 rollout`` and is that server.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swift_stage2.errors import UserError
from swift_stage2.whole_file import write_whole

if TYPE_CHECKING:
    from swift_stage2.rollout_server.engine import Engine

VARIABLE = "SWIFT_STAGE2_FAULT_SWITCHES"
COURIER = "benchmarks.faults.courier"
"""Stands in for the product's own in the learners of the bench."""

_POLL_S = 0.02
LONGEST_WRITE_S = 0.2


class Switch(StrEnum):
    """Names of the switches; each comment begins with who reads it."""

    PUSH = "push"  # courier: what its transport does to the weights of a round, a ``PushFault``
    PUSH_HELD = "push_held"  # bench: the second bucket waits
    PUSH_RELEASED = "push_released"  # courier: let it go
    KILL_COURIER = "kill_courier"  # courier: killed so many seconds into its next errand; it turns this off
    SLOW_DISK = "slow_disk"  # learner: seconds that every write of its audit and ledger takes longer
    INSTALL = "install"  # our server: an ``InstallFault``
    INSTALL_SEEN = "install_seen"  # bench: the one that its engine commits now


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
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self.directory / name, text)

    def clear(self, *names: str) -> None:
        """Turns switches off; those that are off stay so."""
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def clear_all(self) -> None:
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


class PushFault(StrEnum):
    """The weights of a round suffer this on their way."""

    HOLD = "hold"  # the second bucket waits until the bench lets it go
    ZEROS = "zeros"  # announced honestly, but zeros are sent
    REPEAT = "repeat"  # the round before is sent once more: weights that do not move
    TEAR = "tear"  # by a directory: half of its manifest is lost before a server is told of it


class SlowDisk:
    """``write`` is ``os.write``, after the wait that the switch asks for."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def write(self, descriptor: int, data: bytes) -> int:
        """Waits at most ``LONGEST_WRITE_S``; returns the number of bytes written."""
        if seconds := self._switches.read(Switch.SLOW_DISK):
            time.sleep(min(float(seconds), LONGEST_WRITE_S))
        return os.write(descriptor, data)


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """SIGSTOP for the length of a block and SIGCONT after it, also when the block raises."""
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def main(argv: Sequence[str]) -> int:
    """Our rollout server, and a thread that carries a switch's text to the engine's ``install_fault``."""
    from swift_stage2.rollout_server.command_line import parse_command, serve

    command = parse_command(argv)

    def start_engine() -> Engine:
        engine = command.start_engine()
        arguments = (engine, Switches.from_environment())
        threading.Thread(target=_follow, args=arguments, name="install-fault", daemon=True).start()
        return engine

    return serve(replace(command, start_engine=start_engine))


def _follow(engine: Engine, switches: Switches) -> None:
    from swift_stage2.rollout_server.engine import InstallFault

    while True:
        wanted = InstallFault(switches.read(Switch.INSTALL) or InstallFault.NONE)
        if wanted is not engine.install_fault:
            engine.install_fault = wanted
            switches.set(Switch.INSTALL_SEEN, wanted)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
