"""Carries flattened weight buckets from learner rank 0 to one server: gloo for ours, NCCL for stock vLLM.

A transport is used from the push thread only. ``open`` asks the server to join and connects, ``send``
returns when the bytes have left and the server has them, ``close`` may be called at any time.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from swift_stage2 import rollout_protocol as protocol
from swift_stage2.collectives import WeightGroup
from swift_stage2.errors import ServerFault
from swift_stage2.server_session import Deadline, ServerSession

_POLL_S = 0.001


class WeightTransport(Protocol):
    """One way to move bytes to one server."""

    def open(self, session: ServerSession, port: int, deadline: Deadline) -> None: ...

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None: ...

    def close(self) -> None: ...


class GlooTransport:
    """A fresh two-member gloo group for every round, so that nothing of a failed round survives it."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    def open(self, session: ServerSession, port: int, deadline: Deadline) -> None:
        timeout_s = deadline.remaining_s()
        body = {
            "host": session.host,
            "port": port,
            "world_size": 2,
            "backend": "gloo",
            "timeout_s": timeout_s,
        }
        session.post(protocol.INIT_COMMUNICATOR, body, deadline)
        try:
            self._group = WeightGroup(WeightGroup.LEARNER_RANK, session.host, port, timeout_s)
        except RuntimeError as error:
            raise ServerFault(f"{session.base_url}: the weight group did not form: {error}") from error

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        if self._group is None:
            raise ServerFault("the weight group is not open")
        try:
            self._group.broadcast(flat.cpu())
        except RuntimeError as error:
            raise ServerFault(f"the server was lost while weights were sent: {error}") from error

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class NcclTransport:
    """vLLM's stateless NCCL group, as stock ``swift rollout`` joins it; kept from round to round.

    A stock server keeps the first communicator it made, so a failed round has to close it on both sides
    before another can be opened.
    """

    def __init__(self, device: torch.device, api_key: str | None = None) -> None:
        self._device = device
        self._api_key = api_key
        self._communicator: Any = None
        self._joined: str | None = None  # base URL of the server that was asked to join

    def open(self, session: ServerSession, port: int, deadline: Deadline) -> None:
        if self._communicator is not None:
            return
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        world_size = int(session.get(protocol.WORLD_SIZE, deadline)["world_size"]) + 1
        body = {"host": session.host, "port": port, "world_size": world_size}
        self._joined = session.base_url
        session.post(protocol.INIT_COMMUNICATOR, body, deadline)
        try:
            group = StatelessProcessGroup.create(
                host=session.host, port=port, rank=world_size - 1, world_size=world_size
            )
            self._communicator = PyNcclCommunicator(group, device=self._device)
        except (RuntimeError, OSError) as error:
            raise ServerFault(f"{session.base_url}: the weight group did not form: {error}") from error

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        flat = flat.to(self._device)
        stream = torch.cuda.current_stream(self._device)
        self._communicator.broadcast(flat, src=self._communicator.rank, stream=stream)
        # The call above returns when the transfer is queued, not when it is done.
        finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        finished.record(stream)
        while not finished.query():  # type: ignore[no-untyped-call]
            time.sleep(_POLL_S)
        self._communicator.group.barrier()

    def close(self) -> None:
        self._communicator = None
        if self._joined is not None:
            base_url, self._joined = self._joined, None
            with ServerSession(base_url, self._api_key) as session:  # that of ``open`` ended with its round
                session.post(protocol.CLOSE_COMMUNICATOR, {}, Deadline(1.0))
