"""Carries a snapshot from rank 0 to one server: what every transport has to do, and the one to servers of ours.

A transport is used from the push's thread only. ``open`` asks the server to map, listen or read, and connects,
``carry`` returns when the server has all of the weights, ``install`` when it holds them; ``close`` may be called at any
time. Between pushes another thread asks ``is_lost``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from swift_stage2 import wire as protocol
from swift_stage2.config import Transport
from swift_stage2.config.rollout import ServerConfig
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
class Delivery:
    """What a push has a transport bring, where to, and on what terms."""

    session: ServerSession
    server: ServerConfig
    snapshot: SnapshotFile
    spec: UpdateSpec
    require_wanted: Callable[[], None] = lambda: None
    """Raises ServerFault once the push was given up."""

    @property
    def deadline(self) -> Deadline:
        """Of every call."""
        return self.spec.deadline

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port at which the learner meets the server for weights."""
        return self.server.group_host or self.server.host, self.server.group_port

    @property
    def join_s(self) -> float:
        """Seconds that a connection or a group has to form."""
        return min(JOIN_TIMEOUT_S, self.deadline.remaining_s())

    def not_formed(self, error: Exception, remedy: str) -> ServerFault:
        """Of a stream or group that learner and server could not meet for."""
        host, port = self.meeting
        return ServerFault(
            f"{self.session.base_url}: the weight group did not form at {host}:{port}: {error}; if it lasts: {remedy}"
        )


class WeightTransport(Protocol):
    """One way to bring a snapshot, whose header is written, to one server. Raises ServerFault: the server has failed,
    was lost or refuses.
    """

    def open(self, push: Delivery) -> str:
        """Returns how the bytes travel, in a word for reports, with the reason where another way was to be had."""
        ...

    def carry(self, push: Delivery) -> None:
        """Returns when the server has taken all of it; a stock one gets no bucket of a push that was given up."""

    def install(self, push: Delivery, sent: Mapping[str, str]) -> None:
        """Returns when the server computes with the weights, whose checksums are ``sent``, in full."""

    def is_lost(self) -> bool:
        """True if the connection that the transport keeps between pushes has broken; False where it keeps none.

        Callable from any thread; returns within about a second.
        """
        return False

    def close(self, deadline: Deadline) -> None:
        """Ends what ``open`` began and ``install`` has not."""


class OurTransport(WeightTransport):
    """Offers the weights to a server of ours, which takes them beside its generation, and has it install them.

    The server maps the learner's memory where it can, on one host and in one container, and elsewhere gets a stream of
    the push's own; or it reads the version's file, which is written once for all servers.
    """

    def __init__(self, wanted: Transport = Transport.AUTO, disk: DiskVersions | None = None) -> None:
        """``disk`` is there if weights travel by a directory."""
        self._wanted = wanted
        self._disk = disk
        self._stream: WeightStream | None = None

    def open(self, push: Delivery) -> str:
        refusal = ""
        if self._disk is not None:
            self._disk.store(push.snapshot, push.spec.identity, push.deadline)
            answer = self._offer(push, protocol.WeightWay.DISK)
            if not answer.taken:
                raise ServerFault(f"{push.session.base_url} takes no weights from its disk: {answer.message}")
            return protocol.WeightWay.DISK
        if self._wanted is not Transport.TCP:
            answer = self._offer(push, protocol.WeightWay.SHARED_MEMORY, path=push.snapshot.file.path)
            if answer.taken:
                return protocol.WeightWay.SHARED_MEMORY
            refusal = f" ({answer.message})"
        (host, port), num_bytes = push.meeting, push.snapshot.file.num_bytes
        answer = self._offer(push, protocol.WeightWay.STREAM, port=port, num_bytes=num_bytes)
        if not answer.taken or answer.secret is None:
            raise ServerFault(f"{push.session.base_url} takes no weights by a stream: {answer.message}")
        try:
            self._stream = connect_stream(host, port, answer.secret, push.join_s)
        except OSError as error:
            raise push.not_formed(error, group_remedy(error)) from error
        return protocol.WeightWay.STREAM + refusal

    def carry(self, push: Delivery) -> None:
        if self._stream is not None:  # else the bytes are there already
            try:
                self._stream.send(push.snapshot.file.memory, push.deadline.remaining_s())
            except OSError as error:
                raise ServerFault(f"the server was lost while weights were sent: {error}") from error

    def install(self, push: Delivery, sent: Mapping[str, str]) -> None:
        request = protocol.InstallRequest(
            run_id=push.spec.identity.run_id,
            version=push.spec.identity.version,
            checksums=sent,
            timeout_s=push.deadline.remaining_s(),
        )
        body = push.session.post(protocol.INSTALL, request.to_json(), push.deadline)
        check_proof(push.session, push.spec, sent, body)

    def close(self, deadline: Deadline) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _offer(self, push: Delivery, way: protocol.WeightWay, **how: object) -> protocol.OfferAnswer:
        offer = protocol.WeightOffer(
            run_id=push.spec.identity.run_id,
            version=push.spec.identity.version,
            manifest=push.spec.manifest,
            way=way,
            timeout_s=push.deadline.remaining_s(),
            **how,  # type: ignore[arg-type]
        )
        body = push.session.post(protocol.WEIGHTS, offer.to_json(), push.deadline)
        return push.session.read(protocol.WEIGHTS, protocol.OfferAnswer.from_json, body)
