"""Carries one snapshot at a time to the servers of a round, with a push for each, and says how each has fared.

The sync round on rank 0's main thread starts it and asks it; nothing of it waits for a server. ``ThreadCourier`` has
its pushes in the process that it is made in; ``courier_process`` puts one into a process of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from swift_stage2.weights.disk_rounds import CLOSE_S, DiskRounds
from swift_stage2.weights.proof import InstallTurns, RoundOrder
from swift_stage2.weights.push import ServerPush, close_quietly
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
    disk: DiskRounds | None = None,
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
class PushEnd:
    """How one server's push ended: with a report or, when the learner's weights cannot be pushed, with its fault."""

    report: ServerReport | None = None
    learner_fault: str | None = None

    @classmethod
    def failed(cls, error: str) -> PushEnd:
        """Of a push that nobody can ask any more."""
        return cls(ServerReport(proven=False, error=error, proof="", num_bytes=0, seconds={}))


class Courier(Protocol):
    """One round at a time. All methods but ``lost_servers`` belong to one thread, and none of them waits for long."""

    def begin(self, order: RoundOrder, targets: Sequence[int], snapshot: SnapshotFile) -> None:
        """Starts a push of ``snapshot``, which nobody changes before all have ended, to each of ``targets``."""

    def let_install(self) -> None:
        """Servers that wait with their install, because the order has a ``hold``, go on."""

    def revive(self) -> None:
        """Whatever died in a round is replaced ahead of the next one; called at every step."""

    def ends(self) -> Mapping[int, PushEnd]:
        """How the pushes of the round have ended, by server; those that go on are left out."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until all pushes of the round have ended; False when they have not within the time."""

    def give_up(self, error: str) -> None:
        """Ends what has not ended, with ``error``; nothing more of it reaches a server of ours."""

    def confirm(self, version: int) -> None:
        """All ranks have heard of its proof: what lies of it on a disk is a version of the run."""

    def distrust(self, servers: Iterable[int]) -> None:
        """Connections to these servers are not used again: they may come back as other processes."""

    def is_lost(self, server: int) -> bool:
        """Whether what is kept of this server from the round now shows that it has gone."""

    def lost_servers(self) -> tuple[int, ...]:
        """Servers that what is kept between rounds has lost; for any thread, never while a round runs."""

    def close(self) -> None:
        """Ends what runs, within seconds, and closes what is kept. May be called again."""


def thread_courier(
    rollout: RolloutConfig,
    device: torch.device,
    wrap: WrapTransport | None = None,
    *,
    ours: set[str],
    trace: Trace,
) -> ThreadCourier:
    """Carries weights that lie on ``device`` from this process, over transports that are wrapped first."""
    key, sync = rollout.api_key(), rollout.sync
    disk = disk_rounds(sync.disk_directory, sync.disk_keep)
    make = partial(transport_for, device=device, api_key=key, wanted=sync.transport, disk=disk)
    return ThreadCourier(
        endpoints_of(rollout),
        lambda info: wrap(make(info)) if wrap is not None else make(info),
        api_key=key,
        ours=ours,
        span=trace.span,
        disk=disk,
    )


def longest_close_s(num_servers: int) -> float:
    """Seconds after which ``ThreadCourier.close`` has ended, if no disk hangs in a removal."""
    return num_servers * _CLOSE_TIMEOUT_S + _LAST_CALL_S + CLOSE_S


def disk_rounds(directory: str | None, keep: int) -> DiskRounds | None:
    """Where rounds are written, if weights travel by a disk."""
    return None if directory is None else DiskRounds(Path(directory), keep)


@dataclass(eq=False)
class ThreadCourier:
    """Pushes on daemon threads of this process: a push that hangs cannot be ended, and is left behind."""

    endpoints: Sequence[ServerEndpoint]
    make_transport: Callable[[protocol.ServerInfo], WeightTransport]
    _: KW_ONLY
    api_key: str | None = field(default=None, repr=False)
    ours: set[str] = field(default_factory=set)
    """Base URLs of servers that must not answer as stock ones do; rounds add to them."""
    span: EnterSpan = untraced
    """Entered with the name of every phase, on the thread that goes through it."""
    on_end: Callable[[int, PushEnd], None] = lambda server, end: None
    """Hears of every push that ends, on its thread."""
    disk: DiskRounds | None = None
    """Told of every round, for the transports that use it."""

    def __post_init__(self) -> None:
        self._transports: dict[int, WeightTransport] = {}
        self._distrusted: set[int] = set()
        self._pushes: dict[int, ServerPush] = {}
        self._given_up_with: dict[int, PushEnd] = {}
        self._given_up = threading.Event()
        self._turns = InstallTurns()

    def begin(self, order: RoundOrder, targets: Sequence[int], snapshot: SnapshotFile) -> None:
        self._end_pushes()  # what a failed begin has left
        self._pushes, self._given_up_with, self._given_up = {}, {}, threading.Event()
        self._transports = dict(self._transports)  # a push that was left behind has the old one
        self._turns = InstallTurns()
        if self.disk is not None:
            self.disk.begin(order.identity)
        pushes = {
            server: ServerPush(
                server,
                self.endpoints[server],
                order,
                snapshot,
                self._transports,
                self.make_transport,
                turns=self._turns,
                api_key=self.api_key,
                given_up=self._given_up,
                distrusted=server in self._distrusted,
                ours=self.ours,
                span=self.span,
                on_end=lambda push: self.on_end(push.server, _end_of(push)),
            )
            for server in targets
        }
        self._distrusted.difference_update(targets)
        self._pushes = pushes  # whole before the first one runs, which asks at its end whether all have
        for push in pushes.values():
            push.start()

    def let_install(self) -> None:
        self._turns.has_leave.set()

    def revive(self) -> None:
        return  # no thread needs it

    def ends(self) -> Mapping[int, PushEnd]:
        ended = {server: _end_of(push) for server, push in self._pushes.items() if push.finished.is_set()}
        return ended | self._given_up_with

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        return all(push.finished.wait(max(0.0, end - time.monotonic())) for push in self._pushes.values())

    def give_up(self, error: str) -> None:
        """As ``Courier.give_up``. A thread that is inside a transport stays there: to close it could hang as well."""
        self._end_pushes()
        for server, push in self._pushes.items():
            if not push.finished.is_set():
                self._transports.pop(server, None)
                self._given_up_with[server] = PushEnd.failed(error)

    def confirm(self, version: int) -> None:
        if self.disk is not None:
            self.disk.confirm(version)

    def distrust(self, servers: Iterable[int]) -> None:
        self._distrusted.update(servers)

    def is_lost(self, server: int) -> bool:
        kept = self._transports.get(server)
        return kept is not None and kept.is_lost()

    def is_ours(self, server: int) -> bool:
        """True if the server with this number has shown in a round, or at the start, that it runs our program."""
        return self.endpoints[server].base_url in self.ours

    def lost_servers(self) -> tuple[int, ...]:
        return tuple(server for server, kept in list(self._transports.items()) if kept.is_lost())

    def close(self) -> None:
        self._end_pushes()
        for transport in list(self._transports.values()):
            close_quietly(transport, Deadline(_CLOSE_TIMEOUT_S))
        self._transports.clear()
        # A thread that the interpreter's end meets inside of torch aborts the process
        self.wait(_LAST_CALL_S)
        if self.disk is not None:
            self.disk.close()

    def _end_pushes(self) -> None:
        """They send nothing more, and wait no more with an install."""
        self._given_up.set()
        self._turns.has_leave.set()


def _end_of(push: ServerPush) -> PushEnd:
    return PushEnd(push.report, push.learner_fault)
