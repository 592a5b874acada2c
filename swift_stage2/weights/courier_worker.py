"""The process that carries weights: ``python -m swift_stage2.weights.courier_worker FD PARENT``.

Serves rank 0 over a socket that only these two hold, and ends with it. It maps the rank's snapshot, and owns every
connection to a server that a round needs, so that neither a hang nor a crash in one of them reaches the learner.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from swift_stage2.runtime.worker import serve_rank

if TYPE_CHECKING:  # what loads torch is imported once the rank's import path is known
    import torch

    from swift_stage2.config import Transport
    from swift_stage2.weights.courier import PushEnd
    from swift_stage2.weights.proof import RoundOrder
    from swift_stage2.weights.snapshot import SnapshotFile
    from swift_stage2.weights.transport import ServerEndpoint, WeightTransport
    from swift_stage2.wire import ServerInfo

_LOOK_FOR_LOST_S = 1.0

Interval = tuple[str, str, int, int]
"""Name and thread of a phase, its start and end in ns of ``time.perf_counter_ns``: one clock for all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CourierSetup:
    """The first message: what all rounds have in common."""

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
class Errand:
    """One round; of the order's canary only the question goes along."""

    order: RoundOrder
    question: tuple[Mapping[str, Any], Mapping[str, Any]] | None
    targets: tuple[int, ...]
    snapshot: str
    """Path of the rank's ``SnapshotFile``."""
    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class Question:
    """Asks the learner whether these tokens are its own answer to the canary."""

    number: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The learner's answer to the ``Question`` of that number."""

    number: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The push of that version to ``server`` has ended so; ``intervals`` are what was not told before."""

    version: int
    server: int
    end: PushEnd
    is_ours: bool
    """Whether the server has shown itself as ours."""
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tells that what is kept since the push of that version has lost these servers, and no others."""

    version: int
    servers: tuple[int, ...]


class CourierWorker:
    """Does what rank 0 says, one message after another; its pushes answer from their own threads."""

    def __init__(self, connection: Connection, setup: CourierSetup) -> None:
        from swift_stage2.telemetry.timing import untraced
        from swift_stage2.weights.courier import ThreadCourier, disk_rounds

        self._connection = connection
        self._setup = setup
        self._changed = threading.Condition()  # also held to send
        self._looking = threading.Lock()  # for lost servers
        self._judgements: dict[int, bool] = {}
        self._num_questions = 0
        self._intervals: list[Interval] = []
        self._order: RoundOrder | None = None
        self._snapshot: SnapshotFile | None = None
        self._lost: tuple[int, ...] = ()
        self._disk = disk_rounds(setup.disk_directory, setup.disk_keep)
        self._courier = ThreadCourier(
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
                elif self._courier.wait(0.0):
                    self._look_for_lost()
        except EOFError:
            self._courier.close()

    def judge(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the learner agrees with that answer to its canary; on a push's thread.

        Raises:
            ServerFault: it did not say so in the round's time.
        """
        from swift_stage2.errors import ServerFault

        assert self._order is not None
        with self._changed:
            self._num_questions += 1
            number = self._num_questions
            self._connection.send(Question(number, token_ids))
            if not self._changed.wait_for(
                lambda: number in self._judgements, self._order.deadline.remaining_s()
            ):
                raise ServerFault("the learner did not judge the canary's answer in the round's time")
            return self._judgements.pop(number)

    def _take(self, message: Errand | Judgement | methodcaller) -> None:
        """A ``methodcaller`` is a call of the courier that goes along as it is."""
        if isinstance(message, Errand):
            self._begin(message)
        elif isinstance(message, methodcaller):
            message(self._courier)
        else:
            with self._changed:
                self._judgements[message.number] = message.agrees
                self._changed.notify_all()

    def _begin(self, errand: Errand) -> None:
        from swift_stage2.weights.snapshot import SnapshotFile

        if self._snapshot is None:
            self._snapshot = SnapshotFile(
                errand.order.manifest, bucket_bytes=errand.bucket_bytes, path=errand.snapshot
            )
        canary = _RemoteCanary(*errand.question, self) if errand.question else None
        with self._looking:
            self._order, self._lost = replace(errand.order, canary=canary), ()
        self._courier.begin(self._order, errand.targets, self._snapshot)

    def _make_transport(self, info: ServerInfo) -> WeightTransport:
        from swift_stage2.weights.courier import transport_for

        return transport_for(
            info,
            device=self._setup.device,
            api_key=self._setup.api_key,
            wanted=self._setup.transport,
            disk=self._disk,
        )

    def _tell_end(self, server: int, end: PushEnd) -> None:
        assert self._order is not None
        if self._courier.wait(0.0):  # the last: before rank 0 believes proofs that are older than this one
            self._look_for_lost()
        with self._changed:
            intervals, self._intervals = tuple(self._intervals), []
            is_ours = self._courier.is_ours(server)
            self._connection.send(Ended(self._order.version, server, end, is_ours, intervals))

    def _look_for_lost(self) -> None:
        with self._looking:
            if (lost := self._courier.lost_servers()) != self._lost:
                assert self._order is not None
                with self._changed:
                    self._connection.send(Lost(self._order.version, lost))
                self._lost = lost

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            interval = (name, threading.current_thread().name, started, time.perf_counter_ns())
            with self._changed:
                self._intervals.append(interval)


class _RemoteCanary:
    """The learner's canary, which the learner has answered and alone can judge."""

    def __init__(self, request: Mapping[str, Any], config: Mapping[str, Any], worker: CourierWorker) -> None:
        self.request, self.config = dict(request), dict(config)
        self._worker = worker

    def answer(self) -> None:
        """Nothing: it is answered before a round."""

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """As ``Canary.agrees``. Raises as ``CourierWorker.judge``."""
        return self._worker.judge(tuple(token_ids))


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
        CourierWorker(connection, setup).serve()


if __name__ == "__main__":
    # Not as __main__: messages must be of the same classes on both sides.
    from swift_stage2.weights import courier_worker

    courier_worker.main(int(sys.argv[1]), int(sys.argv[2]))
