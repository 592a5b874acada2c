"""A command and all that it starts, under a supervisor that ends the whole tree; and the signals that ask for an end.

    python -m swift_stage2.runtime.supervisor --grace-s 30 [--parent PID] -- COMMAND …

A process group is not enough: torchrun gives every rank a session of its own, and an engine's workers outlive their
parent. So the supervisor adopts orphans, which keeps everything below it. It ends when its command does, on a signal,
or when its parent is gone, of which the kernel tells it. The command gets SIGTERM first and its grace; whatever it
leaves is ended after it. Were the supervisor itself killed, the kernel would tell the command, and who started the
supervisor, if it adopts orphans too, ends the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

_MODULE = "swift_stage2.runtime.supervisor"
_SUPERVISOR = "SWIFT_STAGE2_SUPERVISOR"  # process id, in the environment of whatever is below one
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LONGEST_STRAY_PATIENCE_S = 10.0
_KILL_DEADLINE_S = 10.0
_MARGIN_S = 25.0  # beyond the command's grace, for a supervisor to end what the command left
_LONGEST_WAIT_S = 3600.0
_SAME_REQUEST_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TRACKER = "multiprocessing.resource_tracker"


@dataclass(frozen=True, slots=True)
class Command:
    """A command to start: a name for people, argv, the whole environment, seconds from SIGTERM to SIGKILL."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    grace_s: float


class ProcessTree:
    """A running command under a supervisor, in a session of its own. Output goes to a file, not to a pipe:
    the command must be able to write its last words when the launcher is gone. Main thread only."""

    def __init__(self, command: Command, log_path: Path) -> None:
        self.command = command
        self.log_path = log_path
        self._is_asked = False
        options = [f"--grace-s={command.grace_s}", f"--parent={os.getpid()}"]
        with open(log_path, "ab", opener=_private) as log:
            self.log_offset = log.tell()  # before it, earlier processes wrote
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *options, "--", *command.argv],
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._supervisor.pid

    def poll(self) -> int | None:
        """Exit status of the command, None while anything of it runs. 128 + n when signal n ended it."""
        status = self._supervisor.poll()
        return status if status is None or status >= 0 else 128 - status

    def ask_to_end(self) -> None:
        """Tells the supervisor to end the tree; may be called again."""
        if not self._is_asked:
            self._is_asked = True
            self._supervisor.terminate()

    def end(self, step: Callable[[], bool]) -> bool:
        """Asks, and does ``step`` until the tree has ended. Kills the supervisor when that takes too long or ``step``
        says that there is no time, and returns whether it did: the tree is then the caller's to end."""
        self.ask_to_end()
        end = time.monotonic() + self.command.grace_s + _MARGIN_S
        while self.poll() is None:
            if not step() or time.monotonic() >= end:
                self._supervisor.kill()
                with suppress(subprocess.TimeoutExpired):  # one that the kernel holds ends nobody else's end
                    self._supervisor.wait(timeout=_KILL_DEADLINE_S)
                return True
        return False


def _private(path: str, flags: int) -> int:
    """A log may quote rows and answers, and is as private as the event log."""
    return os.open(path, flags, 0o600)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: int) -> None:
    """The kernel sends signal ``number`` to this process when the parent's thread that started it is gone."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has gone already
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def end_descendants(patience_s: float, spare: Collection[int] = ()) -> list[int]:
    """SIGTERM to everything below this process, SIGKILL after ``patience_s`` to what is left.

    Children in ``spare``, and what is below them, are left alone. Children that are ended are also reaped. Python's
    resource trackers come last: they remove the shared memory of killed processes, and end by themselves.

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
        for process in [each for each in alive if not _is_tracker(each)] or alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)
    return [process.pid for process in alive]


def _descendants(spare: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in spare:
            found.append(child)
            with suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
    return found


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(_TRACKER in word for word in process.cmdline())
    return False


def _is_nohup(number: int) -> bool:
    """A shell's ``&`` has SIGINT ignored as well; that one is asked for by hand."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class StopSignals:
    """While entered, SIGTERM, SIGINT and SIGHUP are only recorded. Main thread only.

    Attributes:
        received: number of the first signal, None until there is one.
        wants_haste: whether a second one came that is a request of its own: a terminal that closes, and ``timeout``,
            send theirs twice.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.wants_haste = False
        self._first_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end)
        for number in _SIGNALS:
            if not _is_nohup(number):
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
            self.received, self._first_s = number, time.monotonic()
        elif number != signal.SIGHUP and time.monotonic() - self._first_s > _SAME_REQUEST_S:
            self.wants_haste = True


def supervise_this_program(grace_s: float) -> None:
    """Makes this process the supervisor of its own command, started anew, unless it is right below one already."""
    if os.environ.get(_SUPERVISOR) != str(os.getppid()):
        words = [sys.executable, "-m", _MODULE, f"--grace-s={grace_s}", "--", *sys.orig_argv]
        os.execv(sys.executable, words)


def main(argv: Sequence[str]) -> int:
    """Runs the command to its end. Returns its exit status, 128 + n when signal n ended it."""
    parser = argparse.ArgumentParser(prog=_MODULE)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    adopt_orphans()
    with StopSignals() as signals:
        if options.parent is not None:
            end_with_parent(options.parent, signal.SIGTERM)
        try:
            child = subprocess.Popen(
                options.command,
                stdin=subprocess.DEVNULL,
                env=os.environ | {_SUPERVISOR: str(os.getpid())},
                start_new_session=True,  # a terminal's Ctrl-C asks the supervisor
                preexec_fn=partial(_begin, os.getpid()),
            )
        except OSError as error:
            print(f"the command must be a program that can be started, got {error}", flush=True)
            return 127
        pidfd = os.pidfd_open(child.pid)
        while child.poll() is None and signals.received is None:
            signals.wait(_LONGEST_WAIT_S, also=(pidfd,))
        _end(child, pidfd, signals, options.grace_s)
        status = -signal.SIGKILL if child.returncode is None else child.returncode
        # What a killed torchrun has left saves a checkpoint.
        is_struck = status < 0 and signals.received is None
        left = end_descendants(
            options.grace_s if is_struck else min(options.grace_s, _LONGEST_STRAY_PATIENCE_S)
        )
    if left:
        print(f"processes that SIGKILL did not end: {left}", flush=True)
    return status if status >= 0 else 128 - status


def _begin(supervisor: int) -> None:
    """Before the command replaces this process: a signal ends it already, and is not recorded for nobody."""
    for number in _SIGNALS:
        if not _is_nohup(number):
            signal.signal(number, signal.SIG_DFL)
    end_with_parent(supervisor, signal.SIGTERM)


def _end(child: subprocess.Popen[bytes], pidfd: int, signals: StopSignals, grace_s: float) -> None:
    """SIGTERM, and SIGKILL after the grace. A second signal changes nothing: whoever started it kills, or waits."""
    if child.poll() is None:
        child.terminate()
    end = time.monotonic() + grace_s
    while child.poll() is None and (left_s := end - time.monotonic()) > 0:
        signals.wait(left_s, also=(pidfd,))
    if child.poll() is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel may hold it
            child.wait(timeout=_KILL_DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
