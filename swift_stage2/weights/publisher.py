"""Publishes snapshots: one push per server at a time, each beside the others, and says how each has ended.

``Updates`` on rank 0's main thread starts pushes and takes results; nothing of it waits for a server.
``ThreadPublisher`` has its pushes in the process that it is made in; ``publisher_process`` puts one into a process of
its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from swift_stage2 import wire as protocol
from swift_stage2.config import RolloutConfig, Transport
from swift_stage2.records import ServerReport
from swift_stage2.servers.session import Deadline
from swift_stage2.telemetry.timing import EnterSpan, Trace, untraced
from swift_stage2.weights.disk_versions import CLOSE_S, DiskVersions
from swift_stage2.weights.proof import UpdateSpec
from swift_stage2.weights.push import InstallTurns, ServerPush, close_quietly
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.stock_transport import StockTransport
from swift_stage2.weights.transport import (
    DiskTransport,
    MappedTransport,
    ServerEndpoint,
    StreamTransport,
    WeightTransport,
    WrapTransport,
    endpoints_of,
)
from swift_stage2.weights.vllm_transport import VllmTransport

_CLOSE_TIMEOUT_S = 1.0
_LAST_CALL_S = 5.0  # for one call of a push that was given up


def transport_for(
    info: protocol.ServerInfo,
    *,
    device: torch.device,
    api_key: str | None,
    wanted: Transport = Transport.AUTO,
    disk: DiskVersions | None = None,
) -> WeightTransport:
    """The way to carry weights to a server of this kind; ``disk`` is there if they travel by a directory."""
    if info.chat_model is not None:
        return VllmTransport(device, api_key)
    if info.stock:
        return StockTransport(device, api_key)
    if disk is not None:
        return DiskTransport(disk, info)
    if wanted is Transport.TCP:
        return StreamTransport()
    return MappedTransport(required=wanted is Transport.SHARED_MEMORY)


@dataclass(frozen=True, slots=True)
class PushResult:
    """How one server's push ended: with a report or, when the learner's weights cannot be pushed, with its fault."""

    report: ServerReport | None = None
    learner_fault: str | None = None

    @classmethod
    def failed(cls, error: str) -> PushResult:
        """Of a push that nobody can ask any more."""
        return cls(ServerReport.failed(error))


class Publisher(Protocol):
    """All methods belong to one thread; only ``wait`` waits for long."""

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        """Starts a push of ``snapshot``, which nobody changes before it has ended. None runs for that server."""

    def take_results(self) -> Sequence[tuple[int, PushResult]]:
        """Pushes that have ended since the last call, by server, in the order of their ends."""

    def give_up(self, error: str) -> None:
        """Ends all pushes that run, with ``error``; nothing more of them reaches a server."""

    def confirm(self, version: int) -> None:
        """All ranks have heard that a server has proven it: what lies of it on a disk is a version of the run."""

    def distrust(self, server: int) -> None:
        """Connections to it are not used again: it may come back as another process."""

    def is_lost(self, server: int) -> bool:
        """Whether what is kept of this server shows that it has gone."""

    def lost_servers(self) -> tuple[int, ...]:
        """Servers of which what is kept between pushes shows that they have gone."""

    def revive(self) -> None:
        """Whatever died is replaced ahead of the next push; called at every step."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until no push runs; False when one still does."""

    def close(self) -> None:
        """Ends what runs, within seconds, and closes what is kept. May be called again."""


def thread_publisher(
    rollout: RolloutConfig,
    device: torch.device,
    wrap: WrapTransport | None = None,
    *,
    ours: set[str],
    trace: Trace,
) -> ThreadPublisher:
    """Carries weights that lie on ``device`` from this process, over transports that are wrapped first."""
    key, sync = rollout.api_key(), rollout.sync
    disk = disk_versions(sync.disk_directory, sync.disk_keep)
    make = partial(transport_for, device=device, api_key=key, wanted=sync.transport, disk=disk)
    return ThreadPublisher(
        endpoints_of(rollout),
        lambda info: wrap(make(info)) if wrap is not None else make(info),
        api_key=key,
        ours=ours,
        span=trace.span,
        disk=disk,
    )


def longest_close_s(num_servers: int) -> float:
    """Seconds after which ``ThreadPublisher.close`` has ended, if no disk hangs in a removal."""
    return num_servers * _CLOSE_TIMEOUT_S + _LAST_CALL_S + CLOSE_S


def disk_versions(directory: str | None, keep: int) -> DiskVersions | None:
    """Where versions are written, if weights travel by a disk."""
    return None if directory is None else DiskVersions(Path(directory), keep)


@dataclass(eq=False)
class ThreadPublisher:
    """Pushes on daemon threads of this process: a push that hangs cannot be ended, and is left behind."""

    endpoints: Sequence[ServerEndpoint]
    make_transport: Callable[[protocol.ServerInfo], WeightTransport]
    _: KW_ONLY
    api_key: str | None = field(default=None, repr=False)
    ours: set[str] = field(default_factory=set)
    """Base URLs of servers that must not answer as stock ones do; pushes add to them."""
    span: EnterSpan = untraced
    """Entered with the name of every phase, on the thread that goes through it."""
    on_end: Callable[[int, PushResult], None] | None = None
    """Takes every result on the push's thread, in place of ``take_results``."""
    disk: DiskVersions | None = None
    """Told of every version, for the transports that use it."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._transports: dict[int, WeightTransport] = {}
        self._distrusted: set[int] = set()
        self._pushes: dict[int, ServerPush] = {}  # that run
        self._results: list[tuple[int, PushResult]] = []
        self._given_up = threading.Event()
        self._turns = InstallTurns()

    def push(self, server: int, spec: UpdateSpec, snapshot: SnapshotFile) -> None:
        if self.disk is not None:
            self.disk.begin(spec.identity)
        push = ServerPush(
            server,
            self.endpoints[server],
            spec,
            snapshot,
            self._transports,
            self.make_transport,
            turns=self._turns,
            api_key=self.api_key,
            given_up=self._given_up,
            distrusted=server in self._distrusted,
            ours=self.ours,
            span=self.span,
            on_end=self._note_end,
        )
        self._distrusted.discard(server)
        with self._changed:
            self._pushes[server] = push
        push.start()

    def take_results(self) -> Sequence[tuple[int, PushResult]]:
        with self._changed:
            results, self._results = self._results, []
        return results

    def give_up(self, error: str) -> None:
        """As ``Publisher.give_up``. A thread that is inside a transport stays there: to close it could hang as well."""
        self._given_up.set()
        # A push that was left behind keeps the old ones.
        self._given_up, self._turns = threading.Event(), InstallTurns()
        with self._changed:
            pushes, self._pushes = self._pushes, {}
            self._transports = {
                server: each for server, each in self._transports.items() if server not in pushes
            }
            self._results += [(server, PushResult.failed(error)) for server in pushes]

    def confirm(self, version: int) -> None:
        if self.disk is not None:
            self.disk.confirm(version)

    def distrust(self, server: int) -> None:
        self._distrusted.add(server)

    def is_lost(self, server: int) -> bool:
        kept = self._transports.get(server)
        return kept is not None and kept.is_lost()

    def is_ours(self, server: int) -> bool:
        """True if the server with this number has shown in a push, or at the start, that it runs our program."""
        return self.endpoints[server].base_url in self.ours

    def lost_servers(self) -> tuple[int, ...]:
        kept = [
            (server, each) for server, each in list(self._transports.items()) if server not in self._pushes
        ]
        return tuple(server for server, each in kept if server not in self._distrusted and each.is_lost())

    def revive(self) -> None:
        return  # no thread needs it

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._pushes, max(0.0, timeout_s))

    def close(self) -> None:
        self._given_up.set()
        for transport in list(self._transports.values()):
            close_quietly(transport, Deadline(_CLOSE_TIMEOUT_S))
        self._transports.clear()
        # A thread that the interpreter's end meets inside of torch aborts the process
        self.wait(_LAST_CALL_S)
        if self.disk is not None:
            self.disk.close()

    def _note_end(self, push: ServerPush) -> None:
        """On the push's thread. Nothing of one that was given up."""
        with self._changed:
            if self._pushes.get(push.server) is not push:
                return
            del self._pushes[push.server]
            result = PushResult(push.report, push.learner_fault)
            if self.on_end is None:
                self._results.append((push.server, result))
            self._changed.notify_all()
        if self.on_end is not None:
            self.on_end(push.server, result)
