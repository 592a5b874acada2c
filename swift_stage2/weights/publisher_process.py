"""Has weights published by a process beside rank 0 (``publisher_worker``), which may hang, crash or be killed.

One that is late is killed and reaped before anything else begins, so that it cannot wake and push; what it carried has
failed, and another one takes its place at the next step. Training notices nothing of it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from queue import SimpleQueue

import torch

from swift_stage2.config import RolloutConfig
from swift_stage2.runtime.worker import describe_end, start_worker
from swift_stage2.telemetry.timing import Trace
from swift_stage2.weights.proof import UpdateSpec
from swift_stage2.weights.publisher import PushResult, longest_close_s
from swift_stage2.weights.publisher_worker import (
    Ended,
    Lost,
    PublisherSetup,
    PushCommand,
)
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.transport import endpoints_of

logger = logging.getLogger(__name__)

_END_S = 10.0

RecordInterval = Callable[[str, int, int, str], None]
"""Takes a phase's name, its start and end in ns of ``time.perf_counter_ns``, and the thread that went through it."""


def process_publisher(
    rollout: RolloutConfig,
    device: torch.device,
    *,
    ours: set[str] | None = None,
    trace: Trace | None = None,
    disk_keep: int | None = None,
) -> ProcessPublisher:
    """Publishes weights that lie on ``device`` from a process of its own. Called on the main thread.

    ``disk_keep``: 0 for a run that leaves no version behind.
    """
    setup = PublisherSetup(
        endpoints=endpoints_of(rollout),
        api_key=rollout.api_key(),
        ours=frozenset(ours or ()),
        device=device,
        transport=rollout.sync.transport,
        is_traced=trace is not None and trace.enabled,
        disk_directory=rollout.sync.disk_directory,
        disk_keep=rollout.sync.disk_keep if disk_keep is None else disk_keep,
    )
    return ProcessPublisher(setup, ours=ours, record=trace.record if trace is not None else _unrecorded)


def _unrecorded(name: str, start_ns: int, end_ns: int, track: str) -> None: ...


class ProcessPublisher:
    """A ``Publisher`` in a process of its own. Made, and asked to push, on the main thread, with which it ends."""

    def __init__(
        self,
        setup: PublisherSetup,
        *,
        ours: set[str] | None = None,
        record: RecordInterval = _unrecorded,
    ) -> None:
        """``ours`` learns the base URLs of servers that turn out to be ours."""
        self._setup = setup
        self._ours = set() if ours is None else ours
        self._record = record
        self._changed = threading.Condition()
        self._running: set[int] = set()  # servers that a push runs to
        self._results: list[tuple[int, PushResult]] = []
        self._lost: tuple[int, ...] = ()
        self._worker = self._start()

    @property
    def pid(self) -> int:
        """Of the process that publishes now."""
        return self._worker.process.pid

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        if self._worker.has_ended:  # first: its end must not become that of this push
            self._replace()
        self._worker.has_carried = True
        with self._changed:
            self._running.add(server)
            self._lost = tuple(each for each in self._lost if each != server)
        self._worker.send(PushCommand(server, spec, snapshot.file.path, snapshot.bucket_bytes))
        if self._worker.has_ended:  # meanwhile: its end may have been told of earlier pushes
            self._fail("the process that publishes weights has ended; another one takes its place")

    def take_results(self) -> Sequence[tuple[int, PushResult]]:
        with self._changed:
            results, self._results = self._results, []
        return results

    def give_up(self, error: str) -> None:
        """As ``Publisher.give_up``: the process is killed."""
        self._worker.end(0.0)  # first: what it still says must not undo what its end means
        self._fail(error)

    def confirm(self, version: int) -> None:
        self._worker.send(methodcaller("confirm", version))

    def distrust(self, server: int) -> None:
        self._worker.send(methodcaller("distrust", server))

    def is_lost(self, server: int) -> bool:
        """As ``Publisher.is_lost``, as far as the process has found it out; it looks every second."""
        return server in self._lost

    def lost_servers(self) -> tuple[int, ...]:
        return self._lost

    def revive(self) -> None:
        """As ``Publisher.revive``. One that dies before it has carried anything is left to the next push."""
        if self._worker.exit_reported and self._worker.has_carried:
            try:
                self._replace()
            except OSError as error:  # the next step tries again, and ``push`` fails
                logger.warning("no process can be started to publish weights: %s", error)

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, max(0.0, timeout_s))

    def close(self) -> None:
        """As ``Publisher.close``. What the process closes has limits of its own, which it may use up."""
        self._worker.end(longest_close_s(len(self._setup.endpoints)))

    def _start(self) -> _Worker:
        return _Worker(self._setup, self._take, self._on_end)

    def _replace(self) -> None:
        self._worker.end(0.0)
        self._worker = self._start()

    def _take(self, message: Ended | Lost) -> None:
        """On the thread that hears the worker."""
        if isinstance(message, Lost):
            with self._changed:
                self._lost = tuple(server for server in message.servers if server not in self._running)
            return
        for name, track, start_ns, end_ns in message.intervals:
            self._record(name, start_ns, end_ns, track)
        with self._changed:
            if message.is_ours:
                self._ours.add(self._setup.endpoints[message.server].base_url)
            self._end(message.server, message.result)

    def _on_end(self, how: str) -> None:
        self._fail(f"the process that publishes weights {how}; another one takes its place")

    def _fail(self, error: str) -> None:
        """The process is over, and with it the groups that tell when a stock server is another process."""
        with self._changed:
            self._lost = tuple(
                server
                for server, endpoint in enumerate(self._setup.endpoints)
                if endpoint.base_url not in self._ours
            )
            for server in tuple(self._running):
                self._end(server, PushResult.failed(error))

    def _end(self, server: int, result: PushResult) -> None:
        """Under the lock."""
        if server in self._running:
            self._running.remove(server)
            self._results.append((server, result))
            self._changed.notify_all()


class _Worker:
    """One process, and the thread that hears it until it has ended."""

    def __init__(
        self,
        setup: PublisherSetup,
        take: Callable[[Ended | Lost], object],
        on_end: Callable[[str], None],
    ) -> None:
        self._take = take
        self._on_end = on_end
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()
        self._is_closing = False
        self.has_ended = False
        """Whether nothing can be sent to it any more."""
        self.has_carried = False
        self.process, self._socket = start_worker("swift_stage2.weights.publisher_worker", {})
        self._connection = Connection(os.dup(self._socket.fileno()))
        self.send(tuple(sys.path))
        self.send(setup)
        self._thread = threading.Thread(target=self._hear, name="publisher", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name="publisher-commands", daemon=True)
        self._thread.start()
        self._sender.start()

    @property
    def exit_reported(self) -> bool:
        """Whether it has ended, and ``on_end`` has been told so if it was not asked to."""
        return not self._thread.is_alive()

    def send(self, message: object) -> None:
        """Sends it behind those before, and waits for nothing: a process that starts, or stands still, does not read.

        Its socket holds no large manifest and no picture of a canary. One that has ended needs nothing any more.
        """
        self._outbox.put(ForkingPickler.dumps(message))

    def end(self, patience_s: float) -> None:
        """Lets it close what it holds for so long, then kills and reaps it. May be called again."""
        self._is_closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends what is being sent, too
        self._outbox.put(None)
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        if self.process.returncode is None:
            logger.warning(
                "the process that publishes weights, pid=%d, was killed and lives on", self.process.pid
            )
        self._thread.join(_END_S)
        self._sender.join(_END_S)
        self._connection.close()
        self._socket.close()

    def _send_all(self) -> None:
        with suppress(OSError):
            while True:
                message = self._outbox.get()  # deadline: the worker's life, as ``end`` tells
                if message is None:
                    return
                self._connection.send_bytes(message)

    def _hear(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())  # deadline: the worker's life
        except (EOFError, OSError):
            pass  # it has ended, or is told to
        except Exception:  # top of the thread: nobody hears the process any more
            logger.exception("the process that publishes weights cannot be understood, and is killed")
            self.process.kill()
        self.has_ended = True
        if self._is_closing:
            return
        try:
            how = describe_end(self.process.wait(_END_S))
        except subprocess.TimeoutExpired:
            how = "has closed its connection to the learner"
        logger.warning("the process that publishes weights %s", how)
        self._on_end(how)
