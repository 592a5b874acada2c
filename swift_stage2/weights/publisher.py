"""Publishes snapshots: one push per server at a time, each beside the others, and says how each has ended.

``Updates`` on rank 0's main thread starts pushes and takes results; nothing of it waits for a server.
``ThreadPublisher`` has its pushes in the process that it is made in; ``publisher_process`` puts one into a process of
its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch

from swift_stage2 import wire as protocol
from swift_stage2.config import RolloutConfig
from swift_stage2.config.rollout import ServerConfig
from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.records import ServerReport
from swift_stage2.servers.session import Deadline, ServerSession, reset_cache
from swift_stage2.servers.stock import ask_sums_incarnation
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights.disk_versions import PATIENCE_S, DiskVersions
from swift_stage2.weights.proof import UpdateSpec, prove_server
from swift_stage2.weights.snapshot import SnapshotFile, describe_fault
from swift_stage2.weights.stock_transport import StockTransport, VllmTransport
from swift_stage2.weights.transport import Delivery, OurTransport, WeightTransport

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_LAST_CALL_S = 5.0  # for one call of a push that was given up
_SHARE_FOR_TURN = 0.5  # of what is left of the calls' time

PushResult = ServerReport | WeightSyncError
"""How one server's push ended, or, when the learner's weights cannot be pushed, why."""


class Publisher:
    """Pushes that run, and how they have ended. All methods belong to one thread; only ``wait`` waits for long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[int, _Push | None] = {}
        self._results: list[tuple[int, PushResult]] = []

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        """Starts a push of ``snapshot``, which nobody changes before it has ended. None runs for that server."""
        raise NotImplementedError

    def take_results(self) -> Sequence[tuple[int, PushResult]]:
        """Pushes that have ended since the last call, by server, in the order of their ends. Called at every step."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def give_up(self, error: str) -> None:
        """Ends all pushes that run, with ``error``; nothing more of them reaches a server."""
        raise NotImplementedError

    def confirm(self, version: int) -> None:
        """All ranks have heard that a server has proven it: what lies of it on a disk is a version of the run."""

    def drop_connection(self, server: int) -> None:
        """The next push connects anew: the server may come back as another process."""

    def lost_servers(self) -> tuple[int, ...]:
        """Servers of which what is kept between pushes shows that they have gone."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:
        """Waits until no push runs; False when one still does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, max(0.0, timeout_s))

    def close(self) -> None:
        """Ends what runs, within seconds, and closes what is kept. May be called again."""

    def _end(self, server: int, result: PushResult) -> None:
        """Under the lock."""
        if server in self._running:
            del self._running[server]
            self._results.append((server, result))
            self._changed.notify_all()


def thread_publisher(
    rollout: RolloutConfig,
    device: torch.device,
    *,
    ours: set[str],
    disk_keep: int,
    span: EnterSpan,
    on_end: Callable[[], object],
) -> ThreadPublisher:
    """Carries weights that lie on ``device`` to the servers of ``rollout``, each by the transport of its kind.

    ``disk_keep``: proven versions that stay, if weights travel by a disk.
    """
    sync, key = rollout.sync, rollout.api_key()
    disk = DiskVersions(Path(sync.disk_directory), disk_keep) if sync.disk_directory is not None else None

    def make_transport(info: protocol.ServerInfo) -> WeightTransport:
        if info.chat_model is not None:
            return VllmTransport(device, key)
        return StockTransport(device, key) if info.stock else OurTransport(sync.transport, disk)

    return ThreadPublisher(
        rollout.servers, make_transport, api_key=key, ours=ours, span=span, on_end=on_end, disk=disk
    )


def longest_close_s(num_servers: int) -> float:
    """Seconds after which ``ThreadPublisher.close`` has ended, if no disk hangs in a removal."""
    return num_servers * _CLOSE_TIMEOUT_S + _LAST_CALL_S + PATIENCE_S


@dataclass(eq=False)
class ThreadPublisher(Publisher):
    """Pushes on daemon threads of this process: a push that hangs cannot be ended, and is left behind."""

    servers: Sequence[ServerConfig]
    make_transport: Callable[[protocol.ServerInfo], WeightTransport]
    _: KW_ONLY
    api_key: str | None = field(default=None, repr=False)
    ours: set[str] = field(default_factory=set)
    """Base URLs of servers that must not answer as stock ones do; pushes add to them."""
    span: EnterSpan = untraced
    """Entered with the name of every phase, on the thread that goes through it."""
    on_end: Callable[[], object] = lambda: None
    """Called when a push has ended, on its thread."""
    disk: DiskVersions | None = None
    """Told which versions stay."""

    def __post_init__(self) -> None:
        super().__init__()
        # By server, what outlives a push; a push has it meanwhile.
        self._kept: dict[int, WeightTransport] = {}
        self._dropped: set[int] = set()
        self.installing = threading.Lock()
        """Held by servers that are asked, so that others answer while one installs. That is worth no server: who holds
        it may hang, or wait for long answers."""

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        push = _Push(self, server, spec, snapshot, self._kept.pop(server, None), server in self._dropped)
        self._dropped.discard(server)
        with self._changed:
            self._running[server] = push
        threading.Thread(
            target=self._run, args=(push,), name=f"push to {push.server.base_url}", daemon=True
        ).start()

    def give_up(self, error: str) -> None:
        """As ``Publisher.give_up``. A thread that is inside a transport stays there: to close it could hang as well."""
        with self._changed:
            for server, push in list(self._running.items()):
                assert push is not None
                push.is_wanted = False
                self._end(server, ServerReport.failed(error))

    def confirm(self, version: int) -> None:
        if self.disk is not None:
            self.disk.confirm(version)

    def drop_connection(self, server: int) -> None:
        self._dropped.add(server)

    def lost_servers(self) -> tuple[int, ...]:
        kept = [(server, each) for server, each in list(self._kept.items()) if server not in self._dropped]
        return tuple(server for server, each in kept if each.is_lost())

    def close(self) -> None:
        pushes = [push for push in list(self._running.values()) if push is not None]
        for push in pushes:
            push.is_wanted = False
        for transport in [*self._kept.values(), *(push.transport for push in pushes)]:
            close_quietly(transport, Deadline(_CLOSE_TIMEOUT_S))
        self._kept.clear()
        # A thread that the interpreter's end meets inside of torch aborts the process
        self.wait(_LAST_CALL_S)
        if self.disk is not None:
            self.disk.close()

    def _run(self, push: _Push) -> None:
        """On the push's thread. Nothing is told of one that was given up."""
        result = push.run()
        with self._changed:
            if self._running.get(push.number) is push:
                if push.transport is not None:
                    self._kept[push.number] = push.transport
                self._end(push.number, result)
        self.on_end()


@dataclass(eq=False)
class _Push:
    """Brings one server to one version: asks who it is, connects, carries, installs, proves.

    Each runs on a daemon thread, because a transfer that hangs cannot be joined, and reads the snapshot at its own
    pace. ``transport`` is what the one before has kept; it is replaced if the push ``starts_anew``.
    """

    publisher: ThreadPublisher
    number: int
    spec: UpdateSpec
    snapshot: SnapshotFile
    transport: WeightTransport | None
    starts_anew: bool
    is_wanted: bool = True

    def __post_init__(self) -> None:
        self.server = self.publisher.servers[self.number]
        self._seconds: dict[str, float] = {}
        self._num_bytes = 0
        self._proof = self._carried_by = ""

    def run(self) -> PushResult:
        """To its end."""
        base_url, publisher = self.server.base_url, self.publisher
        error = None
        try:
            self._update(ServerSession(base_url, publisher.api_key, must_be_ours=base_url in publisher.ours))
        except ServerFault as fault:
            self._drop_transport()
            error = str(fault)
        except Exception as fault:  # top of a thread: anything else is the learner's own fault
            self._drop_transport()
            return WeightSyncError(describe_fault("the push of the learner's weights", fault))
        return ServerReport(
            proven=error is None,
            error=error,
            proof=self._proof,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            transport=self._carried_by,
        )

    def _update(self, session: ServerSession) -> None:
        spec, snapshot = self.spec, self.snapshot
        if self.starts_anew:
            self._drop_transport()
        with self._phase("begin"):
            info = session.info(spec.deadline)
            sums_of = None
            if not info.stock:
                self.publisher.ours.add(session.base_url)
            elif info.is_swift_rollout:
                # Ordered: it answers once nothing runs any more that a lost caller has asked.
                self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
                sums_of = ask_sums_incarnation(session, spec.deadline)
                if self.transport is None:
                    shown = "can show every tensor's checksum" if sums_of else "shows no checksums"
                    logger.info("%s is a stock server and %s", session.base_url, shown)
        with self._phase("pack"):
            sent = snapshot.describe(spec.identity)
        delivery = Delivery(session, self.server, snapshot, spec, self._require_wanted)
        with self._phase("connect"):
            transport = self.transport = self.transport or self.publisher.make_transport(info)
            self._carried_by = transport.open(delivery)
        with self._phase("push"):
            transport.carry(delivery)
        self._num_bytes = snapshot.num_bytes
        with self._turn():
            with self._phase("acknowledge"):
                transport.install(delivery, sent)
                if info.is_swift_rollout:
                    # The prefix cache last: vLLM's engine returns nothing from the other two, so that a stock server
                    # reports False for them also when they worked; they are ordered before the one that can tell.
                    for path in (protocol.RESET_ENCODER_CACHE, protocol.RESET_MM_CACHE):
                        reset_cache(session, path, spec.deadline)
                    self._reset_cache(session, protocol.RESET_PREFIX_CACHE)
                if not info.stock:
                    self._drop_transport()
            with self._phase("prove"):
                if not (info.stock or info.manifest):  # it has loaded since it was asked
                    info = session.info(spec.deadline)
                self._proof = prove_server(session, spec, info, sent, sums_of=sums_of)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Held, if the push may wait for one: its install needs time as well, also behind a long transfer."""
        has_turn, lock = False, self.publisher.installing
        if self.spec.turn_s:
            with self._phase("turn"):
                turn_s = min(self.spec.turn_s, self.spec.deadline.remaining_s() * _SHARE_FOR_TURN)
                has_turn = lock.acquire(timeout=turn_s)
        try:
            yield
        finally:
            if has_turn:
                lock.release()

    def _reset_cache(self, session: ServerSession, path: str) -> None:
        if not reset_cache(session, path, self.spec.deadline):
            raise ServerFault(
                f"{session.base_url}{path} reports status: False: an earlier command failed; read its log"
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to one phase. Raises ServerFault: the push was given up."""
        self._require_wanted()
        started = time.perf_counter()
        try:
            with self.publisher.span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _require_wanted(self) -> None:
        if not self.is_wanted:
            raise ServerFault(f"{self.server.base_url}: the push was given up before the weights were proven")

    def _drop_transport(self) -> None:
        transport, self.transport = self.transport, None
        close_quietly(transport, self.spec.deadline)


def close_quietly(transport: WeightTransport | None, deadline: Deadline) -> None:
    """Closes a transport whose peer may be gone."""
    if transport is not None:
        with suppress(ServerFault, RuntimeError):  # there is nothing left to close
            transport.close(deadline)
