"""The bench tells its server by a file which fault an install shall have, and the server says that it knows.

``python -m benchmarks.faults.switches`` takes the options of ``swift-stage2 rollout`` and is that server.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swift_stage2.whole_file import write_whole

if TYPE_CHECKING:
    from swift_stage2.rollout_server.engine import Engine

VARIABLE = "SWIFT_STAGE2_FAULT_SWITCH"
_POLL_S = 0.02


class InstallSwitch:
    """A short text in a file that appears whole or not at all, and one beside it in which the server repeats it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = path.with_suffix(".seen")

    def set(self, text: str) -> None:
        write_whole(self.path, text)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def read(self) -> str:
        """Empty when it is off."""
        return _read(self.path)

    def confirm(self, text: str) -> None:
        write_whole(self._seen, text)

    def seen(self) -> str:
        return _read(self._seen)


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
    """Our rollout server, and a thread that carries the switch's text to the engine's ``install_fault``."""
    from swift_stage2.rollout_server.command_line import parse_command, serve

    command = parse_command(argv)

    def start_engine() -> Engine:
        engine = command.start_engine()
        arguments = (engine, InstallSwitch(Path(os.environ[VARIABLE])))
        threading.Thread(target=_follow, args=arguments, name="install-fault", daemon=True).start()
        return engine

    return serve(replace(command, start_engine=start_engine))


def _follow(engine: Engine, switch: InstallSwitch) -> None:
    from swift_stage2.rollout_server.engine import InstallFault

    while True:
        wanted = InstallFault(switch.read() or InstallFault.NONE)
        if wanted is not engine.install_fault:
            engine.install_fault = wanted
            switch.confirm(wanted)
        time.sleep(_POLL_S)


def _read(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
