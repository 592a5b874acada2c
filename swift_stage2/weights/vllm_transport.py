"""Brings weights to a plain ``vllm serve`` by vLLM's own weight transfer: pause, join, one broadcast a tensor, resume.

Backend ``nccl`` of ``--weight-transfer-config``, not packed: the learner is member 0 and so listens at ``group_port``
of *its own* host, where the workers come. Without a GPU the same calls run over gloo (``cpu_support``); they were not
run over NCCL. A server whose round fails stays paused, because its model may lie in pieces; the next round mends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from swift_stage2.errors import FaultKind, ServerFault
from swift_stage2.runtime.background import BackgroundCall
from swift_stage2.runtime.network import local_address_towards
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import vllm_name
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.snapshot import SnapshotFile, WeightBucket
from swift_stage2.weights.stock_transport import StockTransport
from swift_stage2.weights.transport import JOIN_TIMEOUT_S, ServerEndpoint

_CALL_TIMEOUT_S = 1.0
_POLL_S = 0.01
_NO_SUM = ["0" * 16] * 2  # of zeros, in a checksum
_NUM_SHOWN = 3


class VllmTransport(StockTransport):
    """A group that is kept from round to round with the workers of one ``vllm serve``."""

    def __init__(self, device: torch.device, api_key: str | None = None) -> None:
        super().__init__(device, api_key)
        self._holds: str | None = None  # weight version of the last round, once it has ended
        self._blank: Mapping[str, str] = {}  # digests of zeros, in the first round after a join

    def open(
        self, session: ServerSession, endpoint: ServerEndpoint, snapshot: SnapshotFile, order: RoundOrder
    ) -> str:
        """Pauses the server, joins its workers, unless they have been joined, and has them take buckets."""
        deadline = order.deadline
        self._holds, holds = None, self._holds
        is_kept = self._communicator is not None and holds == vllm_serve.ask_weight_version(session, deadline)
        session.post(vllm_serve.PAUSE, {}, deadline)
        if not is_kept:
            self._drop_communicator()
            _end_leftovers(session, deadline)
            self._join(session, endpoint, deadline)
            self._blank = vllm_serve.ask_digests(session, deadline, blank=True)
        session.post(vllm_serve.START_UPDATE, {}, deadline)
        return "gloo" if self._device.type == "cpu" else "nccl"

    def carry_bucket(
        self, session: ServerSession, snapshot: SnapshotFile, bucket: WeightBucket, deadline: Deadline
    ) -> None:
        """Tensor by tensor: the workers wait for one broadcast each."""
        specs = bucket.specs
        body = {
            "update_info": {
                "names": [spec.name for spec in specs],
                "dtype_names": [spec.dtype for spec in specs],
                "shapes": [spec.shape for spec in specs],
            }
        }
        taking = BackgroundCall(
            lambda: session.post(vllm_serve.UPDATE_WEIGHTS, body, deadline), "the workers' receiving"
        )
        for spec in specs:
            if taking.ended_within(0.0):
                break  # it has failed: nobody receives any more
            self.send(snapshot.tensors[spec.name], deadline)
        try:
            taking.result_within(deadline.remaining_s())
        except RuntimeError as error:
            raise ServerFault(f"{session.base_url}: {error}") from error

    def finish(self, session: ServerSession, order: RoundOrder, sent: Mapping[str, str]) -> None:
        """The server holds the weights under the round's version, and answers again.

        Raises:
            ServerFault: it does not, or the first round after a join has not reached every parameter.
        """
        deadline = order.deadline
        version = str(vllm_serve.WeightVersion(order.run_id, order.version))
        session.post(vllm_serve.FINISH_UPDATE, {"weight_version": version}, deadline)
        if self._blank:
            self._require_reached(session, sent, deadline)
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
            with ServerSession(self._joined, self._api_key) as session:
                return vllm_serve.ask_weight_version(session, Deadline(_CALL_TIMEOUT_S)) != self._holds
        except ServerFault as fault:
            return fault.kind is not FaultKind.LATE

    def close(self, deadline: Deadline) -> None:
        """Has the workers leave the group after a whole round; after another one an update may be open, and they would
        fail: the next join comes first."""
        self._drop_communicator()
        holds, self._holds = self._holds, None
        if self._joined is not None and holds is not None:
            base_url, self._joined = self._joined, None
            with ServerSession(base_url, self._api_key) as session:
                timeout_s = min(_CALL_TIMEOUT_S, deadline.remaining_s())
                session.post(vllm_serve.SHUTDOWN_TRANSFER, {}, Deadline(timeout_s))

    def _join(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None:
        where = f"{session.base_url}: the weight group did not form"
        try:
            world_size = vllm_serve.ask_num_workers(session, deadline) + 1
            http_port = urlsplit(session.base_url).port or 80
            host = endpoint.group_bind or local_address_towards(session.host, http_port)
        except OSError as error:
            raise ServerFault(f"{where}: {error}") from error
        body = {
            "init_info": {
                "master_address": host,
                "master_port": endpoint.group_port,
                "rank_offset": 1,
                "world_size": world_size,
                "packed": False,
            }
        }
        self._joined = session.base_url
        join_s = min(JOIN_TIMEOUT_S, deadline.remaining_s())
        end = time.monotonic() + join_s
        asking = BackgroundCall(
            lambda: session.post(vllm_serve.INIT_TRANSFER, body, deadline), "joining workers"
        )
        joining = BackgroundCall(lambda: self._form(host, endpoint.group_port, world_size, join_s), "joining")
        try:
            while not joining.ended_within(_POLL_S) and time.monotonic() < end:
                if asking.ended_within(0.0):
                    asking.result_within(0.0)
            self._communicator = joining.result_within(0.0)
            asking.result_within(deadline.remaining_s())
        except (RuntimeError, OSError) as error:
            raise ServerFault(
                f"{where} at {host}:{endpoint.group_port}, where this learner listens for the workers: {error}; if it "
                "lasts, let a firewall pass every TCP port between the two machines, or name another group_port or "
                "group_bind, which is an address of the learner's host"
            ) from error

    def _require_reached(self, session: ServerSession, sent: Mapping[str, str], deadline: Deadline) -> None:
        blank, self._blank = self._blank, {}
        if left := unreached(blank, vllm_serve.ask_digests(session, deadline), sent):
            raise ServerFault(
                f"{session.base_url} must load every parameter from the learner's tensors, got {len(left)} of "
                f"{len(blank)} that none reached, {', '.join(left[:_NUM_SHOWN])} for one; serve the learner's model, "
                "or use swift-stage2 rollout"
            )

    def _form(self, host: str, port: int, world_size: int, timeout_s: float) -> Any:
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(
            host=host, port=port, rank=0, world_size=world_size, store_timeout=math.ceil(timeout_s)
        )
        return self._connect(group, timeout_s)

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


def _end_leftovers(session: ServerSession, deadline: Deadline) -> None:
    """Ends an update that another learner began, and forgets what it left half loaded: its tensors would be counted
    among those of this round, and a layer be put together of both."""
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
