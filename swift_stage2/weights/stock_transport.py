"""Carries weights to a stock ``swift rollout`` through vLLM's own group, over NCCL or, without a GPU, over gloo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from swift_stage2 import wire as protocol
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.runtime.network import connection_error, group_remedy, local_address_towards
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.snapshot import SnapshotFile, WeightBucket
from swift_stage2.weights.transport import JOIN_TIMEOUT_S, ServerEndpoint, WeightTransport, not_formed

_POLL_S = 0.001
_CLOSE_TIMEOUT_S = 1.0
_IS_LOST_TIMEOUT_S = 1.0
_DIAGNOSIS_TIMEOUT_S = 2.0
_LOOK_FOR_LOST_S = 1.0  # while weights travel
_SHARE_FOR_JOINING = 0.9  # of the time left; the rest is for finding out why a group did not form
_ANY_KEY = "stage2"  # no member sets it; what counts is that the store answers


class StockTransport(WeightTransport):
    """vLLM's stateless group, as stock ``swift rollout`` joins it; kept from round to round.

    The members are the server's workers and, as the highest rank, the learner. On a GPU the bytes travel over
    NCCL, which may not report a lost peer; without one over gloo, which does (``GlooCommunicator``). A stock
    worker keeps the first communicator it made, without a word, so a new one starts with an ordered close: also
    the one of an earlier run whose learner was killed. vLLM's group exchanges its metadata with pickle over its
    own TCP store: whoever can reach ``group_port`` during a round is trusted, as NCCL trusts its peers.

    The store lives in the server's first worker, so its connection breaks with that process: the only word there is
    of a stock server that is restarted between two calls. A store in a frozen process never answers, whatever its
    timeout; what talks to it has a thread that is left behind.
    """

    def __init__(self, device: torch.device, api_key: str | None = None) -> None:
        self._device = device
        self._api_key = api_key
        self._communicator: Any = None
        self._question: BackgroundCall[bool] | None = None  # to the store, not answered yet
        self._stream: Any = None
        self._joined: str | None = None  # base URL of the server that was asked to join

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, order: RoundOrder
    ) -> str:
        deadline = order.deadline
        kind = "gloo" if self._device.type == "cpu" else "nccl"
        if self._communicator is not None and not self.is_lost() and self._question is None:
            return kind
        self._drop_communicator()
        host, port = endpoint.group_host or session.host, endpoint.group_port
        try:  # first: a worker that was asked to join would wait for minutes, deaf to every other call
            local_address_towards(host, port)
        except OSError as error:
            raise not_formed(session, host, port, error, group_remedy(error)) from error
        world_size = ask_world_size(session, deadline) + 1
        from vllm.distributed.utils import StatelessProcessGroup

        self._joined = session.base_url
        session.post(protocol.CLOSE_COMMUNICATOR, {}, deadline)
        body = {"host": endpoint.group_bind or session.host, "port": port, "world_size": world_size}
        session.post(protocol.INIT_COMMUNICATOR, body, deadline)
        join_s = min(JOIN_TIMEOUT_S, _SHARE_FOR_JOINING * deadline.remaining_s())

        def join() -> Any:
            group = StatelessProcessGroup.create(
                host=host,
                port=port,
                rank=world_size - 1,
                world_size=world_size,
                store_timeout=math.ceil(join_s),
            )
            return self._connect(group, join_s)

        try:
            joining = BackgroundCall(join, "joining the weight group")
            self._communicator = joining.result_within(join_s)
        except (RuntimeError, OSError) as error:
            raise not_formed(session, host, port, error, _remedy_for_group(host, port, deadline)) from error
        return kind

    def carry(
        self,
        session: ServerSession,
        snapshot: SnapshotFile,
        deadline: Deadline,
        require_wanted: Callable[[], None],
    ) -> None:
        for bucket in snapshot.buckets:
            require_wanted()
            self.carry_bucket(session, snapshot, bucket, deadline)

    def carry_bucket(
        self, session: ServerSession, snapshot: SnapshotFile, bucket: WeightBucket, deadline: Deadline
    ) -> None:
        session.post(protocol.UPDATE_FLATTENED_PARAMS, {"metadatas": bucket.metadata}, deadline)
        self.send(bucket.flat, deadline)

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        """Broadcasts contiguous bytes on the CPU to all members. Raises ServerFault: the server was lost."""
        if self._communicator is None:
            raise ServerFault("the weight group is not open")
        communicator = self._communicator
        on_device = self._on_device(flat)  # no part of what a lost server may break
        try:
            if self._device.type == "cpu":
                communicator.broadcast(on_device, communicator.rank, timeout_s=deadline.remaining_s())
            else:
                self._send_on_stream(on_device, deadline)
            self._settle(deadline)
        except RuntimeError as error:
            raise ServerFault(f"the server was lost while weights were sent: {error}") from error

    def is_lost(self) -> bool:
        """A server that is merely silent is not called lost; it may be a busy machine, and rollouts will tell."""
        return self._asks_in_vain(_IS_LOST_TIMEOUT_S)

    def _asks_in_vain(self, wait_s: float) -> bool:
        """True if the store's connection has broken. Waits ``wait_s`` at most; the next call reads a late answer."""
        communicator = self._communicator
        if communicator is None:
            return False
        question, timeout_s = self._question, 0.0
        if question is None:
            store, timeout_s = communicator.group.store, wait_s
            question = self._question = BackgroundCall(
                lambda: bool(store.check([_ANY_KEY])), "asking the store"
            )
        if not question.ended_within(timeout_s):
            return False
        self._question = None
        try:
            question.result_within(0.0)
        except RuntimeError:
            return True
        return False

    def close(self, deadline: Deadline) -> None:
        self._drop_communicator()
        if self._joined is not None:
            base_url, self._joined = self._joined, None
            with ServerSession(base_url, self._api_key) as session:  # that of ``open`` ended with its round
                session.post(
                    protocol.CLOSE_COMMUNICATOR, {}, Deadline(min(_CLOSE_TIMEOUT_S, deadline.remaining_s()))
                )

    def _drop_communicator(self) -> None:
        """NCCL keeps its memory on the device until it is told."""
        communicator, self._communicator, self._question = self._communicator, None, None
        if communicator is not None:
            communicator.destroy()

    def _connect(self, group: Any, timeout_s: float) -> Any:
        if self._device.type == "cpu":
            return GlooCommunicator(group, timeout_s=timeout_s)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        communicator = PyNcclCommunicator(group, device=self._device)
        if communicator.disabled:  # it would send nothing, and say nothing
            raise WeightSyncError(
                "vLLM must be able to use NCCL beside a learner on a GPU, got a communicator that is switched off; "
                "unset VLLM_DISABLE_PYNCCL, or install NCCL where vLLM finds it"
            )
        return communicator

    def _settle(self, deadline: Deadline) -> None:
        """Waits until every member has what was sent. Raises RuntimeError."""
        group = self._communicator.group
        # Its own timeout bounds no wait for a key; the store's does, unless the store's process is frozen.
        group.store.set_timeout(timedelta(seconds=deadline.remaining_s()))
        remaining_s = deadline.remaining_s()
        barrier = BackgroundCall(lambda: group.barrier(remaining_s), "the group's barrier")
        barrier.result_within(remaining_s)

    def _on_device(self, flat: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return flat
        with torch.cuda.stream(self._own_stream()):
            return flat.to(self._device)

    def _own_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream

    def _send_on_stream(self, flat: torch.Tensor, deadline: Deadline) -> None:
        """On the stream that ``flat`` was copied on, because what else uses the device would wait for a lost server.

        Returns or raises only when the transfer has left the device. One that also survives the end of its group is
        waited for, until the round gives its courier up.
        """
        stream = self._own_stream()
        self._communicator.broadcast(flat, src=self._communicator.rank, stream=stream)
        # The call above returns when the transfer is queued, not when it is done.
        finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        finished.record(stream)
        cause, next_look = "", time.monotonic() + _LOOK_FOR_LOST_S
        while not finished.query():  # type: ignore[no-untyped-call]
            is_aborted = bool(cause)
            if not is_aborted and deadline.expired:
                cause = "the server did not take the weights by the deadline"
            elif not is_aborted and time.monotonic() >= next_look:  # NCCL itself may never tell
                next_look = time.monotonic() + _LOOK_FOR_LOST_S
                cause = "the server was lost while weights were sent" if self._asks_in_vain(0.0) else ""
            if cause and not is_aborted:
                self._communicator.destroy()  # vLLM's word for NCCL's abort; returns within seconds
            time.sleep(_POLL_S)
        if cause:
            raise ServerFault(cause)


def _remedy_for_group(host: str, port: int, deadline: Deadline) -> str:
    """vLLM's store and what it carries raise without saying what failed; a connection of our own does say it."""
    error = connection_error(host, port, min(_DIAGNOSIS_TIMEOUT_S, deadline.remaining_s()))
    if error is not None:
        return group_remedy(error)
    return (
        "its store answers there, so what learner and workers open beside it does not form: let a firewall pass every "
        "TCP port between the two machines, and name the right interface in NCCL_SOCKET_IFNAME on both where it is NCCL"
    )
