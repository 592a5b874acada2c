"""Bytes that travel over a transport's own connection with nothing around it: rounds are compared with that.

``python -m benchmarks.raw_broadcast TRANSPORT PORT NUM_BYTES…`` is the receiving end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

import torch

from benchmarks.servers import BenchServers
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.process.ports import free_ports
from swift_stage2.weights.stream import WeightListener, WeightStream, connect_stream

_HOST = "127.0.0.1"
_PEER_S = 300.0
_SECRET = "0" * 64
_POLL_S = 0.1
_RECEIVER_RANK, _SENDER_RANK = 0, 1


class RawTransport(StrEnum):
    """The connection of one of ``swift_stage2.weights.transport``."""

    OURS = "ours"  # a stream
    STOCK = "stock"  # gloo, in a group of vLLM's


class RawSender:
    """The sending end, which waits for the other one."""

    def __init__(self, transport: RawTransport, port: int) -> None:
        self._stream = _connect(port) if transport is RawTransport.OURS else None
        self._group = _join(port, _SENDER_RANK) if transport is RawTransport.STOCK else None

    @classmethod
    def to_new_peer(
        cls, servers: BenchServers, transport: RawTransport, buckets: Sequence[torch.Tensor]
    ) -> RawSender:
        """Starts a receiver of ``buckets``, which are uint8 of one dimension, beside the servers."""
        (port,) = free_ports(1)
        sizes = [str(bucket.numel()) for bucket in buckets]
        peer = ("-m", "benchmarks.raw_broadcast", transport.value, str(port), *sizes)
        servers.start_process(f"raw-peer-{transport}", (sys.executable, "-u", *peer))
        return cls(transport, port)

    def seconds_to_send(self, buckets: Sequence[torch.Tensor]) -> float:
        started = time.perf_counter()
        for bucket in buckets:
            if self._stream is not None:
                self._stream.send(bucket, _PEER_S)
            elif self._group is not None:
                self._group.broadcast(bucket, _SENDER_RANK)
        return time.perf_counter() - started

    def close(self) -> None:
        """Ends the receiver as well."""
        if self._stream is not None:
            self._stream.close()
        self._group = None


def main(argv: Sequence[str]) -> int:
    """Receives buckets of these sizes again and again, into memory that it keeps, until the sender has gone."""
    transport, port, *sizes = argv
    kept = torch.ones(max(map(int, sizes)), dtype=torch.uint8)
    receive: Callable[[torch.Tensor], None]
    if RawTransport(transport) is RawTransport.OURS:
        stream = WeightListener(_HOST, int(port), _SECRET).accept(_PEER_S)
        receive = partial(stream.receive, timeout_s=_PEER_S)
    else:
        receive = partial(_join(int(port), _RECEIVER_RANK).broadcast, src=_SENDER_RANK)
    while True:
        for size in map(int, sizes):
            try:
                receive(kept[:size])
            except (RuntimeError, OSError):
                return 0  # the sender has gone


def _connect(port: int) -> WeightStream:
    end = time.monotonic() + _PEER_S
    while True:
        try:
            return connect_stream(_HOST, port, _SECRET, _PEER_S)
        except ConnectionRefusedError:  # the peer is being started
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_S)


def _join(port: int, rank: int) -> GlooCommunicator:
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(_HOST, port, rank=rank, world_size=2, store_timeout=int(_PEER_S))
    return GlooCommunicator(group, timeout_s=_PEER_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
