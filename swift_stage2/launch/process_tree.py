"""Processes: one command with its warden and its log; all that is below a process; the signals that ask for an end.

A process group is not enough: torchrun gives every rank a session of its own, and an engine's workers
outlive their parent. A process that adopts orphans keeps them all below itself.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Command:
    """A command to start: a name for people, argv, the whole environment, seconds from SIGTERM to SIGKILL."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    grace_s: float


def _private(path: str, flags: int) -> int:
    """A log may quote rows and answers, and is as private as the event log."""
    return os.open(path, flags, 0o600)


class ProcessTree:
    """A running command under a warden in a session of its own. Output goes to a file, not to a pipe:
    the command must be able to write its last words when the launcher is gone."""

    def __init__(self, command: Command, log_path: Path) -> None:
        self.command = command
        self.log_path = log_path
        self._asked: float | None = None  # monotonic seconds
        read_end, self._control = os.pipe2(os.O_CLOEXEC)
        warden = [sys.executable, "-m", "swift_stage2.launch.warden", f"--control-fd={read_end}"]
        try:
            with open(log_path, "ab", opener=_private) as log:
                self.log_offset = log.tell()  # before it, earlier processes wrote
                self._warden = subprocess.Popen(
                    [*warden, f"--grace-s={command.grace_s}", "--", *command.argv],
                    env=dict(command.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(read_end,),
                )
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        """Process id of the warden."""
        return self._warden.pid

    def poll(self) -> int | None:
        """Exit status of the command, None while anything of it runs. 128 + n when signal n ended it."""
        status = self._warden.poll()
        return status if status is None or status >= 0 else 128 - status

    @property
    def was_abandoned(self) -> bool:
        """Whether the warden itself was killed, which leaves its tree to the launcher."""
        status = self._warden.poll()
        return status is not None and status < 0

    def ask_to_end(self) -> None:
        """Tells the warden to end the tree; may be called again."""
        if self._control >= 0:
            self._asked = time.monotonic()
            os.close(self._control)
            self._control = -1

    def is_overdue(self, margin_s: float) -> bool:
        """Whether it still runs though it was asked to end longer ago than its grace and ``margin_s``."""
        late = self._asked is not None and time.monotonic() > self._asked + self.command.grace_s + margin_s
        return late and self.poll() is None

    def kill_warden(self) -> None:
        """For a warden that outlived its grace. Its tree is then the launcher's to end."""
        self._warden.kill()
        with suppress(subprocess.TimeoutExpired):  # one that the kernel holds ends nobody else's end
            self._warden.wait(timeout=10.0)


_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 10.0
WARDEN_MARGIN_S = 25.0
"""A warden needs this beyond its grace to end what its command left behind."""


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"PR_SET_CHILD_SUBREAPER: {os.strerror(number)}")


def end_descendants(patience_s: float, spare: Collection[int] = ()) -> list[int]:
    """SIGTERM to everything below this process, SIGKILL after ``patience_s`` to what is left.

    Children in ``spare``, and what is below them, are left alone. Children that are ended are also reaped.

    Returns:
        Process ids that even SIGKILL did not end within some seconds; normally none.
    """
    alive = _descendants(spare)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(alive, timeout=patience_s)
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while (alive := _descendants(spare)) and time.monotonic() < deadline:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)
    return [process.pid for process in alive]


def _descendants(spare: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spare:
            continue
        found.append(child)
        with suppress(psutil.NoSuchProcess):
            found += child.children(recursive=True)
    return found


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

    def __exit__(self, *_: object) -> None:
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

    def _record(self, number: int, _: object) -> None:
        if self.received is None:
            self.received = number
        else:
            self.wants_haste = True
