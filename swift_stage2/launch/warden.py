"""A program that runs one command and takes its whole process tree with it when it ends, shared memory included.

It ends when the command ends, on a signal, or when the pipe to the launcher closes. The command gets
SIGTERM first and its grace; whatever it leaves behind is ended after it. Exit status: the command's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from swift_stage2.launch.process_tree import adopt_orphans, end_descendants
from swift_stage2.launch.shared_memory import SharedMemoryWatch
from swift_stage2.launch.stop_signals import StopSignals

_LONGEST_STRAY_PATIENCE_S = 10.0
_KILL_DEADLINE_S = 10.0
_LONGEST_WAIT_S = 60.0
_LOOK_EVERY_S = 5.0  # segments that are younger when their process is killed are not known


def main(argv: Sequence[str]) -> int:
    """Runs the command to its end; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="swift_stage2.launch.warden")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    adopt_orphans()
    with StopSignals() as signals:
        memory = SharedMemoryWatch()
        try:
            child = subprocess.Popen(options.command, stdin=subprocess.DEVNULL)
        except OSError as exc:
            print(
                f"the command must be a program that can be started, got {options.command[0]!r}: {exc}",
                flush=True,
            )
            return 127
        pidfd = os.pidfd_open(child.pid)
        try:
            _wait_for_end(child, pidfd, signals, options.control_fd, memory)
            deadline = time.monotonic() + options.grace_s
            if child.poll() is None:
                child.terminate()
            memory.look(psutil.Process().children(recursive=True))  # reads /proc, which may take long
            _end(child, pidfd, signals, deadline)
        finally:
            os.close(pidfd)
            left = end_descendants(min(options.grace_s, _LONGEST_STRAY_PATIENCE_S))
            abandoned = memory.unlink_abandoned()
    if abandoned.removed:
        print(f"removed shared memory that killed processes left: {', '.join(abandoned.removed)}", flush=True)
    if abandoned.left:
        print(
            f"left in place, because it may be somebody else's: {', '.join(abandoned.left)}; remove it when nobody "
            "needs it",
            flush=True,
        )
    if left:
        print(f"processes that SIGKILL did not end: {left}", flush=True)
    status = child.returncode
    return status if status >= 0 else 128 - status


def _wait_for_end(
    child: subprocess.Popen[bytes],
    pidfd: int,
    signals: StopSignals,
    control_fd: int,
    memory: SharedMemoryWatch,
) -> None:
    """Until the command has ended, a signal came, or the launcher closed the pipe (it never writes)."""
    while child.poll() is None and signals.received is None:
        memory.look(psutil.Process().children(recursive=True))
        signals.wait(_LOOK_EVERY_S, also=(pidfd, control_fd))
        if child.poll() is None and _is_closed(control_fd):
            return


def _is_closed(control_fd: int) -> bool:
    os.set_blocking(control_fd, False)
    try:
        return os.read(control_fd, 1) == b""
    except BlockingIOError:
        return False


def _end(child: subprocess.Popen[bytes], pidfd: int, signals: StopSignals, deadline: float) -> None:
    while child.poll() is None and (left_s := deadline - time.monotonic()) > 0:
        signals.wait(min(left_s, _LONGEST_WAIT_S), also=(pidfd,))
    if child.poll() is None:
        child.kill()
        child.wait(timeout=_KILL_DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
