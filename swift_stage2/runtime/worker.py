"""Starts a process that works for a rank and ends with it; the two talk over a socket pair that only they hold.

The kernel kills the worker when its rank's main thread is gone, however that ended (``PR_SET_PDEATHSIG``). Used by the
process that preprocesses and by the one that carries weights. Neither they nor data loaders' workers heed a signal that
asks the rank to end: SIGTERM and SIGINT are a wish to stop, which all ranks then agree on.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Any

from swift_stage2.runtime.supervisor import end_with_parent

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_WORKERS = {"TOKENIZERS_PARALLELISM": "false", "LOG_LEVEL": "ERROR"}


@contextmanager
def heed_no_stop() -> Iterator[None]:
    """Processes started inside hear neither SIGINT nor SIGTERM, from before their first instruction to their end.

    Both are blocked in this thread meanwhile, which children inherit: a handler that they set themselves comes later
    than a signal may. This process hears them through its other threads, or afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def workers_heed_no_stop() -> Iterator[None]:
    """The same for whatever ``multiprocessing`` starts meanwhile, as data loaders do; on the main thread.

    A signal to a rank's whole group would take the workers that its last steps need. They end with their rank: SIGTERM,
    by which it ends those that are left, is SIGKILL for them.
    """
    start = BaseProcess.start

    def start_unheeding(process: Any) -> None:
        if process._start_method == "spawn":
            ensure_running()  # the first one starts it, which lifts the mask
        with heed_no_stop():
            start(process)
        process._popen.terminate = process._popen.kill

    BaseProcess.start = start_unheeding  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]
        atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)  # torch's raises at such an end


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


def start_worker(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts ``python -m module FD PARENT``; returns the process and the rank's end of the connection to it.

    The worker counts no ranks, repeats none of ms-swift's notices, and imports from where the rank does. A signal to
    the whole group asks the rank, which lets the worker finish what the last steps need.
    """
    ours, theirs = Pipe()
    environment = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    environment.setdefault("OMP_NUM_THREADS", "1")
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment |= {**_OF_WORKERS, "PYTHONPATH": paths}
    with theirs, heed_no_stop():
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return process, ours


def begin_worker(parent: int) -> None:
    """The first act of a process that ``multiprocessing`` spawned for a rank: the same environment, on no GPU.

    It ends with its rank. What it is to import comes with what it is asked first, in this environment.
    """
    end_with_parent(parent, signal.SIGKILL)
    for name in _OF_TORCHRUN:
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(_OF_WORKERS, CUDA_VISIBLE_DEVICES="")


def describe_end(status: int) -> str:
    """How a process ended, by its exit status as ``subprocess`` gives it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


@contextmanager
def serve_rank(descriptor: int, parent: int) -> Iterator[Connection]:
    """The worker's end of the connection. Ends quietly when the rank is gone."""
    end_with_parent(parent, signal.SIGKILL)
    os.set_inheritable(descriptor, False)  # whatever is started from here must not keep the socket open
    with suppress(BrokenPipeError, ConnectionResetError, EOFError), Connection(descriptor) as connection:
        yield connection
