"""Carries a snapshot from learner rank 0 to one server of ours; what every transport has to do.

A transport is used from the push thread only. ``open`` asks the server to listen, map or join, and connects, ``carry``
returns when the server has all of the weights, ``close`` may be called at any time. Between rounds the probe's thread
asks ``is_lost``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from swift_stage2 import wire as protocol
from swift_stage2.config import RolloutConfig
from swift_stage2.errors import ServerFault
from swift_stage2.runtime.network import group_remedy
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.disk_rounds import DiskRounds
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.stream import WeightStream, connect_stream

# For a connection or group to form, whatever the round's time: packets that a firewall drops are no refusal.
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """Where one server answers HTTP, and where learner and server meet for weights."""

    base_url: str
    group_port: int
    group_host: str | None = None
    """The learner connects to it; by default the host of ``base_url``."""
    group_bind: str | None = None
    """A stock server's own address, as it binds what the learner names; by default the host of ``base_url``."""


def endpoints_of(rollout: RolloutConfig) -> tuple[ServerEndpoint, ...]:
    """The addresses at which each of ``rollout.servers`` answers and takes weights."""
    return tuple(
        ServerEndpoint(server.base_url, server.group_port, server.group_host, server.group_bind)
        for server in rollout.servers
    )


def not_formed(session: ServerSession, host: str, port: int, error: Exception, remedy: str) -> ServerFault:
    """Of a stream or group that learner and server could not meet for."""
    return ServerFault(
        f"{session.base_url}: the weight group did not form at {host}:{port}: {error}; if it lasts: {remedy}"
    )


class WeightTransport(Protocol):
    """One way to bring a snapshot, whose header is written, to one server."""

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, order: RoundOrder
    ) -> str:
        """Returns how the bytes travel, in a word for reports, with the reason where another way was to be had."""
        ...

    def carry(
        self,
        session: ServerSession,
        snapshot: SnapshotFile,
        deadline: Deadline,
        require_wanted: Callable[[], None],
    ) -> None:
        """Returns when the server has taken all of it; a stock one gets no bucket any more once ``require_wanted``
        raises. Raises ServerFault: it was lost.
        """

    def finish(self, session: ServerSession, order: RoundOrder, sent: Mapping[str, str]) -> None:
        """With the checksums of all tensors: ends what ``open`` began, where a server must be told.

        Raises ServerFault: it does not hold the weights.
        """
        return

    def is_lost(self) -> bool:
        """True if the connection that the transport keeps between rounds has broken; False where it keeps none.

        Callable from any thread; returns within about a second.
        """
        return False

    def close(self, deadline: Deadline) -> None:
        """Ends what ``open`` began and ``finish`` has not."""
        return


WrapTransport = Callable[[WeightTransport], WeightTransport]


class StreamTransport(WeightTransport):
    """Offers the weights to our server by a fresh connection, so that nothing of a failed round survives it."""

    def __init__(self) -> None:
        self._stream: WeightStream | None = None

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, order: RoundOrder
    ) -> str:
        host, port = endpoint.group_host or session.host, endpoint.group_port
        way, num_bytes = protocol.WeightWay.STREAM, snapshot.file.num_bytes
        answer = _offer(session, order, way, port=port, num_bytes=num_bytes)
        join_s = min(JOIN_TIMEOUT_S, order.deadline.remaining_s())
        try:
            self._stream = connect_stream(host, port, answer.secret or "", join_s)
        except OSError as error:
            raise not_formed(session, host, port, error, group_remedy(error)) from error
        return way

    def carry(self, session: ServerSession, snapshot: SnapshotFile, deadline: Deadline, *_: object) -> None:
        if self._stream is None:
            raise ServerFault("the weight stream is not open")
        try:
            self._stream.send(snapshot.file.memory, deadline.remaining_s())
        except OSError as error:
            raise ServerFault(f"the server was lost while weights were sent: {error}") from error

    def close(self, deadline: Deadline) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class MappedTransport(StreamTransport):
    """Lets a server of ours map the snapshot where it can, on one host and in one container; elsewhere a stream."""

    def __init__(self, *, required: bool = False) -> None:
        """``required``: a server that cannot map the memory is at fault."""
        super().__init__()
        self._required = required
        self._is_mapped = False

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, order: RoundOrder
    ) -> str:
        way = protocol.WeightWay.SHARED_MEMORY
        answer = _offer(session, order, way, path=snapshot.file.path)
        self._is_mapped = answer.taken
        if self._is_mapped:
            return way
        if self._required:
            raise ServerFault(
                f"{session.base_url} must map the learner's memory, got: {answer.message}; write "
                "rollout.sync.transport: auto, or start it on the learner's host, in its container and as its user"
            )
        return f"{super().open(session, endpoint, snapshot, order)} ({answer.message})"

    def carry(self, session: ServerSession, snapshot: SnapshotFile, deadline: Deadline, *_: object) -> None:
        if not self._is_mapped:  # else the bytes are there already
            super().carry(session, snapshot, deadline)


class DiskTransport(WeightTransport):
    """Has a server of ours read the round's file, which is written once for all of them."""

    def __init__(self, disk: DiskRounds, info: protocol.ServerInfo) -> None:
        self._disk = disk
        self._reads_disk = info.reads_disk

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, order: RoundOrder
    ) -> str:
        if not self._reads_disk:
            raise ServerFault(
                f"{session.base_url} must read weights from a directory, got a server without --weights-root; start it "
                f"with --weights-root {self._disk.directory}, or write rollout.sync.transport: auto"
            )
        self._disk.store(snapshot, order.deadline)
        _offer(session, order, protocol.WeightWay.DISK)
        return protocol.WeightWay.DISK

    def carry(self, *_: object) -> None:
        """Nothing: the bytes are there already."""


def _offer(
    session: ServerSession, order: RoundOrder, way: protocol.WeightWay, **place: Any
) -> protocol.OfferAnswer:
    offer = protocol.WeightOffer(
        order.run_id, order.version, order.manifest, way, **place, timeout_s=order.deadline.remaining_s()
    )
    reply = session.post(protocol.WEIGHTS, offer.to_json(), order.deadline)
    return session.read(protocol.WEIGHTS, protocol.OfferAnswer.from_json, reply)
