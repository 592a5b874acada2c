"""Keeps an engine's processes from outliving the server, also when the server itself is killed.

The server marks its environment, which every process below it inherits, and starts this file as a small watcher
that reads a pipe. However the server ends, the pipe closes, and the watcher ends every process that carries the
mark. Standard library only: the watcher starts in milliseconds and without the package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

_MARK = "SWIFT_STAGE2_SERVER_MARK"
# setproctitle would overwrite what /proc shows of the environment; this is its own switch against it.
_KEEP_ENVIRONMENT = "SPT_NOENV"
# A forked process would show the environment that the server was started with, without the mark.
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_TERM_PATIENCE_S = 2.0
_KILL_DEADLINE_S = 10.0
_POLL_S = 0.05
# Unlinks the shared memory that killed processes leave, and ends by itself when they have.
_SPARED = b"multiprocessing.resource_tracker"


class ServerChildren:
    """All processes that are started after this, at any depth. Use as a context manager."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        environment = {key: text for key, text in os.environ.items() if key != _MARK}
        os.environ[_MARK] = self._mark
        os.environ[_KEEP_ENVIRONMENT] = "1"
        os.environ[_START_METHOD] = "spawn"
        read_end, self._write_end = os.pipe()  # not inherited: it closes with this process
        try:
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", __file__, str(read_end), self._mark],
                pass_fds=(read_end,),
                env=environment,
                start_new_session=True,  # a signal to the server's group must not end its watcher
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(read_end)

    def __enter__(self) -> ServerChildren:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        end_marked(self._mark)
        os.close(self._write_end)
        with suppress(subprocess.TimeoutExpired):
            self._watcher.wait(timeout=_KILL_DEADLINE_S)


def end_marked(mark: str) -> list[int]:
    """SIGTERM to every process with the mark but the caller, SIGKILL to what is left after two seconds.

    Returns:
        Process ids that even SIGKILL did not end within ten seconds; normally none.
    """
    begun = time.monotonic()
    signalled: set[int] = set()
    while (found := _marked(mark)) and time.monotonic() - begun < _TERM_PATIENCE_S + _KILL_DEADLINE_S:
        kill = time.monotonic() - begun > _TERM_PATIENCE_S
        for process_id in found:
            if kill or process_id not in signalled:
                signalled.add(process_id)
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL if kill else signal.SIGTERM)
        time.sleep(_POLL_S)
    return found


def _marked(mark: str) -> list[int]:
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            if wanted not in (directory / "environ").read_bytes().split(b"\0"):
                continue
            is_spared = _SPARED in (directory / "cmdline").read_bytes()
        except OSError:  # it has ended, or belongs to somebody else
            continue
        if not is_spared:
            found.append(int(directory.name))
    return found


def _watch(read_end: int, mark: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, and after it
    while os.read(read_end, 1):
        pass  # nobody writes
    left = end_marked(mark)
    if left:
        print(f"processes that SIGKILL did not end: {left}", file=sys.stderr, flush=True)
    return len(left)


if __name__ == "__main__":
    sys.exit(_watch(int(sys.argv[1]), sys.argv[2]))
