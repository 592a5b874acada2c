"""Carries a snapshot from rank 0 to one server of ours; what every transport has to do.

A transport is used from the push's thread only. ``open`` asks the server to map, listen or read, and connects,
``carry`` returns when the server has all of the weights, ``install`` when it holds them; ``close`` may be called at any
time. Between pushes another thread asks ``is_lost``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from swift_stage2 import wire as protocol
from swift_stage2.config import RolloutConfig
from swift_stage2.errors import ServerFault
from swift_stage2.runtime.network import group_remedy
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.disk_versions import DiskVersions
from swift_stage2.weights.proof import UpdateSpec, check_proof
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.stream import WeightStream, connect_stream

# For a connection or group to form, whatever the push's time: packets that a firewall drops are no refusal.
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
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, spec: UpdateSpec
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

    def install(self, session: ServerSession, spec: UpdateSpec, sent: Mapping[str, str]) -> None:
        """Returns when the server computes with the weights, whose checksums are ``sent``, in full.

        Raises ServerFault: it does not.
        """
        ...

    def is_lost(self) -> bool:
        """True if the connection that the transport keeps between pushes has broken; False where it keeps none.

        Callable from any thread; returns within about a second.
        """
        return False

    def close(self, deadline: Deadline) -> None:
        """Ends what ``open`` began and ``install`` has not."""
        return


WrapTransport = Callable[[WeightTransport], WeightTransport]


class OurTransport(WeightTransport):
    """Offers the weights to a server of ours, which takes them beside its generation, and has it install them."""

    def carry(
        self,
        session: ServerSession,
        snapshot: SnapshotFile,
        deadline: Deadline,
        require_wanted: Callable[[], None],
    ) -> None:
        """Nothing, unless a stream carries them: the bytes are there already."""

    def install(self, session: ServerSession, spec: UpdateSpec, sent: Mapping[str, str]) -> None:
        request = protocol.InstallRequest(
            run_id=spec.identity.run_id,
            version=spec.identity.version,
            checksums=sent,
            on_pending=spec.on_pending,
            timeout_s=spec.deadline.remaining_s(),
        )
        body = session.post(protocol.INSTALL, request.to_json(), spec.deadline)
        check_proof(session, spec, sent, body)

    def _offer(
        self, session: ServerSession, spec: UpdateSpec, way: protocol.WeightWay, **how: object
    ) -> protocol.OfferAnswer:
        offer = protocol.WeightOffer(
            run_id=spec.identity.run_id,
            version=spec.identity.version,
            manifest=spec.manifest,
            way=way,
            timeout_s=spec.deadline.remaining_s(),
            **how,  # type: ignore[arg-type]
        )
        body = session.post(protocol.WEIGHTS, offer.to_json(), spec.deadline)
        return session.read(protocol.WEIGHTS, protocol.OfferAnswer.from_json, body)


class StreamTransport(OurTransport):
    """A fresh connection for every push, so that nothing of a failed one survives it."""

    def __init__(self) -> None:
        self._stream: WeightStream | None = None

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, spec: UpdateSpec
    ) -> str:
        host, port = endpoint.group_host or session.host, endpoint.group_port
        way = protocol.WeightWay.STREAM
        answer = self._offer(session, spec, way, port=port, num_bytes=snapshot.file.num_bytes)
        if not answer.taken or answer.secret is None:
            raise ServerFault(f"{session.base_url} takes no weights by a stream: {answer.message}")
        join_s = min(JOIN_TIMEOUT_S, spec.deadline.remaining_s())
        try:
            self._stream = connect_stream(host, port, answer.secret, join_s)
        except OSError as error:
            raise not_formed(session, host, port, error, group_remedy(error)) from error
        return way

    def carry(
        self,
        session: ServerSession,
        snapshot: SnapshotFile,
        deadline: Deadline,
        require_wanted: Callable[[], None],
    ) -> None:
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
    """Lets a server map the snapshot where it can, on one host and in one container; elsewhere a stream."""

    def __init__(self, *, required: bool = False) -> None:
        """``required``: a server that cannot map the memory is at fault."""
        super().__init__()
        self._required = required
        self._is_mapped = False

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, spec: UpdateSpec
    ) -> str:
        way = protocol.WeightWay.SHARED_MEMORY
        answer = self._offer(session, spec, way, path=snapshot.file.path)
        self._is_mapped = answer.taken
        if self._is_mapped:
            return way
        if self._required:
            raise ServerFault(
                f"{session.base_url} must map the learner's memory, got: {answer.message}; write "
                "rollout.sync.transport: auto, or start it on the learner's host, in its container and as its user"
            )
        return f"{super().open(session, endpoint, snapshot, spec)} ({answer.message})"

    def carry(
        self,
        session: ServerSession,
        snapshot: SnapshotFile,
        deadline: Deadline,
        require_wanted: Callable[[], None],
    ) -> None:
        if not self._is_mapped:  # else the bytes are there already
            super().carry(session, snapshot, deadline, require_wanted)


class DiskTransport(OurTransport):
    """Has a server read the version's file, which is written once for all of them."""

    def __init__(self, disk: DiskVersions, info: protocol.ServerInfo) -> None:
        self._disk = disk
        self._reads_disk = info.reads_disk

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, spec: UpdateSpec
    ) -> str:
        if not self._reads_disk:
            raise ServerFault(
                f"{session.base_url} must read weights from a directory, got a server without --weights-root; start it "
                f"with --weights-root {self._disk.directory}, or write rollout.sync.transport: auto"
            )
        self._disk.store(snapshot, spec.deadline)
        answer = self._offer(session, spec, protocol.WeightWay.DISK)
        if not answer.taken:
            raise ServerFault(f"{session.base_url} takes no weights from its disk: {answer.message}")
        return protocol.WeightWay.DISK
