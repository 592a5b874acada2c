"""Has weights published by a process beside rank 0, which may hang, crash or be killed; and is that process's program.

One that is late is killed and reaped before anything else begins, so that it cannot wake and push; what it carried has
failed, and another one takes its place at the next step. Training notices nothing of it.

The process maps the rank's snapshot, and owns every connection to a server that a push needs. It serves rank 0 over a
socket that only these two hold, and ends with it: ``python -m swift_stage2.weights.publisher_process FD PARENT``.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from queue import SimpleQueue

import torch

from swift_stage2.compat import declare_operators
from swift_stage2.config import RolloutConfig
from swift_stage2.records import ServerReport
from swift_stage2.runtime.worker import describe_end, serve_rank, start_worker
from swift_stage2.telemetry.timing import Span, Trace
from swift_stage2.weights.proof import UpdateSpec
from swift_stage2.weights.publisher import (
    Publisher,
    PushResult,
    ThreadPublisher,
    longest_close_s,
    thread_publisher,
)
from swift_stage2.weights.snapshot import SnapshotFile

logger = logging.getLogger(__name__)

_END_S = 10.0
_LOOK_FOR_LOST_S = 1.0


@dataclass(frozen=True, slots=True)
class _News:
    """What has come about in the process since it told the rank last."""

    results: Sequence[tuple[int, PushResult]]
    lost: tuple[int, ...]
    """All servers that are lost now."""
    ours: frozenset[str]
    spans: tuple[Span, ...]


class ProcessPublisher(Publisher):
    """A publisher in a process of its own. Made, and asked to push, on the main thread, with which it ends."""

    def __init__(
        self,
        rollout: RolloutConfig,
        device: torch.device,
        *,
        ours: set[str] | None = None,
        trace: Trace | None = None,
        disk_keep: int | None = None,
    ) -> None:
        """For weights that lie on ``device``. ``ours`` learns the base URLs of servers that turn out to be ours.

        ``disk_keep``: 0 for a run that leaves no version behind.
        """
        super().__init__()
        self._rollout, self._device = rollout, device
        self._ours = set() if ours is None else ours
        self._trace = trace if trace is not None else Trace(enabled=False)
        self._disk_keep = rollout.sync.disk_keep if disk_keep is None else disk_keep
        self._lost: tuple[int, ...] = ()
        self._worker = self._start()

    @property
    def pid(self) -> int:
        """Of the process that publishes now."""
        return self._worker.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has, and waits to be replaced."""
        return self._worker.has_ended

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        if self._worker.has_ended:
            self._bury()
            self._worker = self._start()
        self._worker.has_carried = True
        with self._changed:
            self._running[server] = None
            self._lost = tuple(each for each in self._lost if each != server)
        self._worker.send(methodcaller("push", server, spec, snapshot))

    def take_results(self) -> Sequence[tuple[int, PushResult]]:
        """As ``Publisher.take_results``. A process that has died is replaced ahead of the next push, unless it did so
        before it had carried anything."""
        if self._worker.has_ended and self._worker.has_carried:
            self._bury()
            try:
                self._worker = self._start()
            except OSError as error:  # the next step tries again, and ``push`` fails
                logger.warning("no process can be started to publish weights: %s", error)
        return super().take_results()

    def give_up(self, error: str) -> None:
        """As ``Publisher.give_up``: the process is killed."""
        self._worker.end(0.0)  # first: what it still says must not undo what its end means
        self._fail(error)

    def confirm(self, version: int) -> None:
        self._worker.send(methodcaller("confirm", version))

    def drop_connection(self, server: int) -> None:
        self._worker.send(methodcaller("drop_connection", server))

    def lost_servers(self) -> tuple[int, ...]:
        """As ``Publisher.lost_servers``, as far as the process has found it out; it looks every second."""
        return self._lost

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._worker.has_ended, max(0.0, timeout_s))
            return not self._running

    def close(self) -> None:
        """As ``Publisher.close``. What the process closes has limits of its own, which it may use up."""
        self._worker.end(longest_close_s(len(self._rollout.servers)))

    def _start(self) -> _Worker:
        worker = _Worker(self._take)
        make = partial(
            thread_publisher,
            self._rollout,
            self._device,
            ours=set(self._ours),
            disk_keep=self._disk_keep,
        )
        worker.send((make, self._trace.enabled))
        return worker

    def _bury(self) -> None:
        how = self._worker.end(_END_S)
        logger.warning("the process that publishes weights %s", how)
        self._fail(f"the process that publishes weights {how}; another one takes its place")

    def _take(self, news: _News | None) -> None:
        """On the thread that hears the worker; None: it has ended."""
        with self._changed:
            self._changed.notify_all()
            if news is None:
                return
            self._ours |= news.ours
            for server, result in news.results:
                self._end(server, result)
            self._lost = tuple(server for server in news.lost if server not in self._running)
        for span in news.spans:
            self._trace.record(span.name, span.start_ns, span.end_ns, span.track)

    def _fail(self, error: str) -> None:
        """The process is over, and with it the groups that tell when a stock server is another process."""
        with self._changed:
            for server in tuple(self._running):
                self._end(server, ServerReport.failed(error))
            servers = enumerate(self._rollout.servers)
            self._lost = tuple(number for number, each in servers if each.base_url not in self._ours)


class _Worker:
    """One process, and the threads that talk with it until it has ended."""

    def __init__(self, take: Callable[[_News | None], object]) -> None:
        self._take = take
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()
        self.has_ended = False
        """Whether nothing can be sent to it any more."""
        self.has_carried = False
        self.process, self._connection = start_worker(__name__)
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._hear, "publisher"), (self._send_all, "publisher-commands"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Sends it behind those before, and waits for nothing: a process that starts, or stands still, does not read.

        Its socket holds no large manifest and no picture of a canary. One that has ended needs nothing any more.
        """
        self._outbox.put(ForkingPickler.dumps(message))

    def end(self, patience_s: float) -> str:
        """Lets it close what it holds for so long, then kills and reaps it; how it ended. May be called again."""
        if patience_s:
            self._outbox.put(ForkingPickler.dumps(None))
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_END_S)
        self._connection.close()
        self.has_ended = True
        status = self.process.returncode
        return "was killed and lives on" if status is None else describe_end(status)

    def _send_all(self) -> None:
        with suppress(OSError):
            for message in iter(self._outbox.get, None):  # deadline: the worker's life, as ``end`` tells
                self._connection.send_bytes(message)

    def _hear(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())  # deadline: the worker's life
        except (EOFError, OSError):
            pass  # it has ended
        except Exception:  # top of the thread: nobody hears the process any more
            logger.exception("the process that publishes weights cannot be understood, and is killed")
            self.process.kill()
        self.has_ended = True
        self._take(None)


class _Program:
    """Does what rank 0 says, one call of the publisher after another; its pushes answer from their own threads."""

    def __init__(
        self, connection: Connection, make: Callable[..., ThreadPublisher], *, is_traced: bool
    ) -> None:
        self._connection = connection
        self._telling = threading.Lock()
        self._trace = Trace(is_traced)
        self._lost: tuple[int, ...] = ()
        self._publisher = make(span=self._trace.span, on_end=self._tell)

    def serve(self) -> None:
        """Until the rank says so or is gone."""
        try:
            while True:
                if not self._connection.poll(_LOOK_FOR_LOST_S):
                    self._tell()
                elif (command := self._connection.recv()) is not None:  # deadline: the rank's life
                    with self._telling:  # else a look for lost servers could ask what a push has just taken
                        command(self._publisher)
                else:
                    return
        finally:
            self._publisher.close()

    def _tell(self) -> None:
        """Who is lost is looked for behind the results: before rank 0 believes proofs that are older than this look."""
        with self._telling:
            results, lost = self._publisher.take_results(), self._publisher.lost_servers()
            if results or lost != self._lost:
                self._lost = lost
                ours = frozenset(self._publisher.ours)
                self._connection.send(_News(results, lost, ours, self._trace.take()))


def main(descriptor: int, parent: int) -> None:
    """Serves the rank ``parent`` over the socket ``descriptor``."""
    with serve_rank(descriptor, parent) as connection:
        declare_operators()  # before vLLM imports torchvision
        make, is_traced = connection.recv()  # deadline: the rank's life
        _Program(connection, make, is_traced=is_traced).serve()


if __name__ == "__main__":
    # Not as __main__: messages must be of the same classes on both sides.
    from swift_stage2.weights import publisher_process

    publisher_process.main(int(sys.argv[1]), int(sys.argv[2]))
