"""The process that publishes weights: ``python -m swift_stage2.weights.publisher_worker FD PARENT``.

Serves rank 0 over a socket that only these two hold, and ends with it. It maps the rank's snapshot, and owns every
connection to a server that a push needs, so that neither a hang nor a crash in one of them reaches the learner.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import TYPE_CHECKING

from swift_stage2.runtime.worker import serve_rank

if TYPE_CHECKING:  # what loads torch is imported once the rank's import path is known
    import torch

    from swift_stage2.config import Transport
    from swift_stage2.weights.proof import UpdateSpec
    from swift_stage2.weights.publisher import PushResult
    from swift_stage2.weights.snapshot import SnapshotFile
    from swift_stage2.weights.transport import ServerEndpoint, WeightTransport
    from swift_stage2.wire import ServerInfo

_LOOK_FOR_LOST_S = 1.0

Interval = tuple[str, str, int, int]
"""Name and thread of a phase, its start and end in ns of ``time.perf_counter_ns``: one clock for all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSetup:
    """The first message: what all pushes have in common."""

    endpoints: tuple[ServerEndpoint, ...]
    api_key: str | None = field(repr=False)
    ours: frozenset[str]
    device: torch.device
    """On which stock servers get their weights over NCCL; the CPU stands for gloo."""
    transport: Transport
    is_traced: bool
    disk_directory: str | None = None
    """In which weights lie for servers to read, if they travel so."""
    disk_keep: int = 0
    """Proven versions that stay in it."""


@dataclass(frozen=True, slots=True)
class PushCommand:
    """Starts one push."""

    server: int
    spec: UpdateSpec
    snapshot: str
    """Path of the rank's ``SnapshotFile``."""
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The push to ``server`` has ended so; ``intervals`` are what was not told before."""

    server: int
    result: PushResult
    is_ours: bool
    """Whether the server has shown itself as ours."""
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tells that what is kept between pushes has lost these servers, and no others."""

    servers: tuple[int, ...]


class PublisherWorker:
    """Does what rank 0 says, one message after another; its pushes answer from their own threads."""

    def __init__(self, connection: Connection, setup: PublisherSetup) -> None:
        from swift_stage2.telemetry.timing import untraced
        from swift_stage2.weights.publisher import ThreadPublisher, disk_versions

        self._connection = connection
        self._setup = setup
        self._sending = threading.Lock()
        self._looking = threading.Lock()  # for lost servers
        self._intervals: list[Interval] = []
        self._snapshot: SnapshotFile | None = None
        self._lost: tuple[int, ...] = ()
        self._disk = disk_versions(setup.disk_directory, setup.disk_keep)
        self._publisher = ThreadPublisher(
            setup.endpoints,
            self._make_transport,
            api_key=setup.api_key,
            ours=set(setup.ours),
            span=self._span if setup.is_traced else untraced,
            on_end=self._tell_end,
            disk=self._disk,
        )

    def serve(self) -> None:
        """Until the rank closes its end."""
        try:
            while True:
                if self._connection.poll(_LOOK_FOR_LOST_S):
                    self._take(self._connection.recv())  # deadline: the rank's life, once a message has begun
                else:
                    self._look_for_lost()
        except EOFError:
            self._publisher.close()

    def _take(self, message: PushCommand | methodcaller) -> None:
        """A ``methodcaller`` is a call of the publisher that goes along as it is."""
        if isinstance(message, PushCommand):
            self._push(message)
        else:
            message(self._publisher)

    def _push(self, command: PushCommand) -> None:
        from swift_stage2.weights.snapshot import SnapshotFile

        spec = command.spec
        if self._snapshot is None:
            self._snapshot = SnapshotFile(
                spec.manifest, bucket_bytes=command.bucket_bytes, path=command.snapshot
            )
        self._publisher.push(command.server, spec, self._snapshot)

    def _make_transport(self, info: ServerInfo) -> WeightTransport:
        from swift_stage2.weights.publisher import transport_for

        return transport_for(
            info,
            device=self._setup.device,
            api_key=self._setup.api_key,
            wanted=self._setup.transport,
            disk=self._disk,
        )

    def _tell_end(self, server: int, result: PushResult) -> None:
        self._look_for_lost()  # before rank 0 believes proofs that are older than this one
        with self._sending:
            intervals, self._intervals = tuple(self._intervals), []
            self._connection.send(Ended(server, result, self._publisher.is_ours(server), intervals))

    def _look_for_lost(self) -> None:
        with self._looking:
            if (lost := self._publisher.lost_servers()) != self._lost:
                with self._sending:
                    self._connection.send(Lost(lost))
                self._lost = lost

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            interval = (name, threading.current_thread().name, started, time.perf_counter_ns())
            with self._sending:
                self._intervals.append(interval)


def main(descriptor: int, parent: int) -> None:
    """Serves the rank ``parent`` over the socket ``descriptor``."""
    with serve_rank(descriptor, parent) as (_, connection):
        sys.path[:] = connection.recv()  # deadline: the rank's life
        from swift_stage2.compat import declare_operators

        declare_operators()  # before vLLM imports torchvision
        try:
            setup = connection.recv()  # deadline: the rank's life
        except EOFError:
            return
        PublisherWorker(connection, setup).serve()


if __name__ == "__main__":
    # Not as __main__: messages must be of the same classes on both sides.
    from swift_stage2.weights import publisher_worker

    publisher_worker.main(int(sys.argv[1]), int(sys.argv[2]))
