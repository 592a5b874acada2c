"""Carries weights to servers that are not ours, through vLLM's own group: NCCL or, without a GPU, gloo.

A stock ``swift rollout`` takes buckets. A plain ``vllm serve`` is driven by vLLM's own weight transfer: pause, join,
one broadcast a tensor, resume. Backend ``nccl`` of ``--weight-transfer-config``, not packed: the learner is member 0
and so listens at ``group_port`` of *its own* host, where the workers come. Without a GPU the same calls run over gloo
(``cpu_support``); they were not run over NCCL. A server whose push fails stays paused, because its model may lie in
pieces; the next push mends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from swift_stage2 import wire as protocol
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.errors import FaultKind, ServerFault, WeightSyncError
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.runtime.network import connection_error, group_remedy, local_address_towards
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size, vllm_name
from swift_stage2.weights.snapshot import WeightBucket
from swift_stage2.weights.transport import Delivery, WeightTransport

_POLL_S = 0.001
_CALL_TIMEOUT_S = 1.0  # of a word between pushes
_DIAGNOSIS_TIMEOUT_S = 2.0
_LOOK_FOR_LOST_S = 1.0  # while weights travel
_SHARE_FOR_JOINING = 0.9  # of the time left; the rest is for finding out why a group did not form
_ANY_KEY = "stage2"  # no member sets it; what counts is that the store answers
_NO_SUM = ["0" * 16] * 2  # of zeros, in a checksum
_NUM_SHOWN = 3


class StockTransport(WeightTransport):
    """vLLM's stateless group, as stock ``swift rollout`` joins it; kept from push to push.

    The members are the server's workers and, as the highest rank, the learner. On a GPU the bytes travel over
    NCCL, which may not report a lost peer; without one over gloo, which does (``GlooCommunicator``). A stock
    worker keeps the first communicator it made, without a word, so a new one starts with an ordered close: also
    the one of an earlier run whose learner was killed. vLLM's group exchanges its metadata with pickle over its
    own TCP store: whoever can reach ``group_port`` during a push is trusted, as NCCL trusts its peers.

    The store lives in the server's first worker, so its connection breaks with that process: the only word there is
    of a stock server that is restarted between two calls. A store in a frozen process never answers, whatever its
    timeout; what talks to it has a thread that is left behind.
    """

    def __init__(self, device: torch.device, api_key: str | None = None) -> None:
        self._device = device
        self._api_key = api_key
        self._kind = "gloo" if device.type == "cpu" else "nccl"
        self._communicator: Any = None
        self._question: BackgroundCall[bool] | None = None  # to the store, not answered yet
        self._stream: Any = None
        self._joined: str | None = None  # base URL of the server that was asked to join

    def open(self, push: Delivery) -> str:
        if self._communicator is None or self.is_lost() or self._question is not None:
            self._drop_communicator()
            self._join(push)
        return self._kind

    def carry(self, push: Delivery) -> None:
        for bucket in push.snapshot.buckets:
            push.require_wanted()
            self._carry_bucket(push, bucket)

    def install(self, push: Delivery, sent: Mapping[str, str]) -> None:
        push.session.post(protocol.PROCESS_WEIGHTS, {}, push.deadline)

    def _join(self, push: Delivery) -> None:
        host, port = push.meeting
        try:  # first: a worker that was asked to join would wait for minutes, deaf to every other call
            local_address_towards(host, port)
        except OSError as error:
            raise push.not_formed(error, group_remedy(error)) from error
        world_size = ask_world_size(push.session, push.deadline) + 1
        self._joined = push.session.base_url
        push.session.post(protocol.CLOSE_COMMUNICATOR, {}, push.deadline)
        bind = push.server.group_bind or push.server.host
        body = {"host": bind, "port": port, "world_size": world_size}
        push.session.post(protocol.INIT_COMMUNICATOR, body, push.deadline)
        join_s = min(push.join_s, _SHARE_FOR_JOINING * push.deadline.remaining_s())
        try:
            joining = self._begin_joining(host, port, world_size - 1, world_size, join_s)
            self._communicator = joining.result_within(join_s)
        except (RuntimeError, OSError) as error:
            raise push.not_formed(error, _remedy_for_group(host, port, push.deadline)) from error

    def _begin_joining(
        self, host: str, port: int, rank: int, world_size: int, join_s: float
    ) -> BackgroundCall[Any]:
        from vllm.distributed.utils import StatelessProcessGroup

        def join() -> Any:
            group = StatelessProcessGroup.create(
                host=host, port=port, rank=rank, world_size=world_size, store_timeout=math.ceil(join_s)
            )
            return self._connect(group, join_s)

        return BackgroundCall(join, "joining the weight group")

    def _carry_bucket(self, push: Delivery, bucket: WeightBucket) -> None:
        push.session.post(protocol.UPDATE_FLATTENED_PARAMS, {"metadatas": bucket.metadata}, push.deadline)
        self.send(bucket.flat, push.deadline)

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        """Broadcasts contiguous bytes on the CPU to all members. Raises ServerFault: the server was lost."""
        if self._communicator is None:
            raise ServerFault("the weight group is not open")
        communicator = self._communicator
        on_device = self._on_device(flat)  # no part of what a lost server may break
        try:
            if self._kind == "gloo":
                communicator.broadcast(on_device, communicator.rank, timeout_s=deadline.remaining_s())
            else:
                self._send_on_stream(on_device, deadline)
            self._settle(deadline)
        except RuntimeError as error:
            raise ServerFault(f"the server was lost while weights were sent: {error}") from error

    def is_lost(self) -> bool:
        """A server that is merely silent is not called lost; it may be a busy machine, and rollouts will tell."""
        return self._asks_in_vain(_CALL_TIMEOUT_S)

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
        self._say_goodbye(protocol.CLOSE_COMMUNICATOR, deadline)

    def _say_goodbye(self, path: str, deadline: Deadline) -> None:
        """To who was asked to join, once: the session of ``open`` ended with its push."""
        joined, self._joined = self._joined, None
        if joined is not None:
            timeout_s = min(_CALL_TIMEOUT_S, deadline.remaining_s())
            ServerSession(joined, self._api_key).post(path, {}, Deadline(timeout_s))

    def _drop_communicator(self) -> None:
        """NCCL keeps its memory on the device until it is told."""
        communicator, self._communicator, self._question = self._communicator, None, None
        if communicator is not None:
            communicator.destroy()

    def _connect(self, group: Any, timeout_s: float) -> Any:
        if self._kind == "gloo":
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
        if self._kind == "gloo":
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
        waited for, until the push is given up.
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


class VllmTransport(StockTransport):
    """A group that is kept from push to push with the workers of one plain ``vllm serve``."""

    def __init__(self, device: torch.device, api_key: str | None = None) -> None:
        super().__init__(device, api_key)
        self._holds: str | None = None  # weight version of the last push, once it has ended
        self._blank: Mapping[str, str] = {}  # digests of zeros, in the first push after a join

    def open(self, push: Delivery) -> str:
        """Pauses the server, joins its workers, unless they have been joined, and has them take buckets."""
        session, deadline = push.session, push.deadline
        self._holds, holds = None, self._holds
        is_kept = self._communicator is not None and holds == vllm_serve.ask_weight_version(session, deadline)
        session.post(vllm_serve.PAUSE, {}, deadline)
        if not is_kept:
            self._drop_communicator()
            _end_leftovers(session, deadline)
            self._join(push)
            self._blank = vllm_serve.ask_digests(session, deadline, blank=True)
        session.post(vllm_serve.START_UPDATE, {}, deadline)
        return self._kind

    def install(self, push: Delivery, sent: Mapping[str, str]) -> None:
        """The server holds the weights under its version, and answers again.

        Raises:
            ServerFault: it does not, or the first push after a join has not reached every parameter.
        """
        session, deadline, identity = push.session, push.deadline, push.spec.identity
        version = str(vllm_serve.WeightVersion(identity.run_id, identity.version))
        session.post(vllm_serve.FINISH_UPDATE, {"weight_version": version}, deadline)
        blank, self._blank = self._blank, {}
        if blank and (left := unreached(blank, vllm_serve.ask_digests(session, deadline), sent)):
            raise ServerFault(
                f"{session.base_url} must load every parameter from the learner's tensors, got {len(left)} of "
                f"{len(blank)} that none reached, {', '.join(left[:_NUM_SHOWN])} for one; serve the learner's model, "
                "or use swift-stage2 rollout"
            )
        session.post(vllm_serve.RESUME, {}, deadline)
        said = vllm_serve.ask_weight_version(session, deadline)
        if said != version:
            raise ServerFault(f"{session.base_url} must hold weight version {version}, got {said!r}")
        self._holds = version

    def is_lost(self) -> bool:
        """A process that was started anew has no version of ours; one that is merely silent is not called lost."""
        if self._holds is None or self._joined is None:
            return False
        try:
            session = ServerSession(self._joined, self._api_key)
            return vllm_serve.ask_weight_version(session, Deadline(_CALL_TIMEOUT_S)) != self._holds
        except ServerFault as fault:
            return fault.kind is not FaultKind.LATE

    def close(self, deadline: Deadline) -> None:
        """Has the workers leave the group after a whole push; after another one an update may be open, and they would
        fail: the next join comes first."""
        self._drop_communicator()
        holds, self._holds = self._holds, None
        if holds is not None:
            self._say_goodbye(vllm_serve.SHUTDOWN_TRANSFER, deadline)

    def _carry_bucket(self, push: Delivery, bucket: WeightBucket) -> None:
        """Tensor by tensor: the workers wait for one broadcast each."""
        told = {
            "names": [spec.name for spec in bucket.specs],
            "dtype_names": [spec.dtype for spec in bucket.specs],
            "shapes": [spec.shape for spec in bucket.specs],
        }
        taking = _asking(push, vllm_serve.UPDATE_WEIGHTS, {"update_info": told})
        for spec in bucket.specs:
            if taking.ended_within(0.0):
                break  # it has failed: nobody receives any more
            self.send(push.snapshot.tensors[spec.name], push.deadline)
        try:
            taking.result_within(push.deadline.remaining_s())
        except RuntimeError as error:
            raise ServerFault(f"{push.session.base_url}: {error}") from error

    def _join(self, push: Delivery) -> None:
        session, port = push.session, push.server.group_port
        where = f"{session.base_url}: the weight group did not form"
        try:
            world_size = vllm_serve.ask_num_workers(session, push.deadline) + 1
            host = push.server.group_bind or local_address_towards(push.server.host, push.server.port)
        except OSError as error:
            raise ServerFault(f"{where}: {error}") from error
        told = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        self._joined, join_s = session.base_url, push.join_s
        end = time.monotonic() + join_s
        asking = _asking(push, vllm_serve.INIT_TRANSFER, {"init_info": told | {"packed": False}})
        joining = self._begin_joining(host, port, 0, world_size, join_s)
        try:
            while not joining.ended_within(_POLL_S) and time.monotonic() < end:
                if asking.ended_within(0.0):
                    asking.result_within(0.0)
            self._communicator = joining.result_within(0.0)
            asking.result_within(push.deadline.remaining_s())
        except (RuntimeError, OSError) as error:
            raise ServerFault(
                f"{where} at {host}:{port}, where this learner listens for the workers: {error}; if it lasts, let a "
                "firewall pass every TCP port between the two machines, or name another group_port or group_bind, "
                "which is an address of the learner's host"
            ) from error

    def _settle(self, deadline: Deadline) -> None:
        """No barrier: vLLM's workers answer the call instead."""


def unreached(blank: Mapping[str, str], now: Mapping[str, str], sent: Mapping[str, str]) -> list[str]:
    """Parameters of vLLM that still are zeros, apart from those for which the ``sent`` tensors are zeros, too."""
    zeros = {vllm_name(name) for name, checksum in sent.items() if checksum.split(":")[-2:] == _NO_SUM}
    others = {vllm_name(name) for name, checksum in sent.items() if checksum.split(":")[-2:] != _NO_SUM}
    left = {
        name: vllm_name(name.rpartition(":")[2]) for name, digest in now.items() if blank.get(name) == digest
    }
    return [name for name, plain in left.items() if plain not in zeros or plain in others]


def _asking(push: Delivery, path: str, body: Any) -> BackgroundCall[Any]:
    """A call that the workers answer once what they wait for has come."""
    return BackgroundCall(lambda: push.session.post(path, body, push.deadline), f"the answer of {path}")


def _end_leftovers(session: ServerSession, deadline: Deadline) -> None:
    """Ends an update that another learner began, and forgets what it left half loaded: its tensors would be counted
    among those of this push, and a layer be put together of both."""
    num_workers = vllm_serve.ask_num_workers(session, deadline)
    try:
        session.post(vllm_serve.START_UPDATE, {}, deadline)
    except ServerFault as fault:
        if "not configured" in str(fault):
            raise ServerFault(
                f"{fault}; start it with {vllm_serve.TRANSFER_OPTION}", kind=fault.kind, status=fault.status
            ) from fault
        # vLLM reads one worker's failure, and then takes the others' for the answers to its next call.
        if "already active" not in str(fault) or num_workers > 1:
            raise
    session.post(vllm_serve.FINISH_UPDATE, {}, deadline)
    session.post(vllm_serve.SHUTDOWN_TRANSFER, {}, deadline)
