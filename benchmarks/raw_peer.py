"""The receiving end of a raw broadcast, as a process of its own; started by ``bench sync``.

``python -m benchmarks.raw_peer TRANSPORT MEMORY PORT NUM_BYTES…`` receives these buckets again and again
until the sender has gone. MEMORY is ``kept``: buffers are allocated and touched before the first broadcast; or
``new``: one is allocated for every broadcast, as stock ``swift rollout`` does, and its pages come while it is filled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from swift_stage2.collectives import GlooCommunicator
from swift_stage2.weights.stream import WeightListener, WeightStream, connect_stream

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
OURS = "ours"
STOCK = "stock"
KEPT = "kept"
NEW = "new"
_SECRET = "0" * 64
_POLL_S = 0.1
_RECEIVER_RANK, _SENDER_RANK = 0, 1


class RawSender:
    """The sending end: the transport's own connection, and nothing around it."""

    def __init__(self, transport: str, port: int) -> None:
        self._stream = _connect(port) if transport == OURS else None
        self._group = _join(port, _SENDER_RANK) if transport == STOCK else None

    def send(self, flat: torch.Tensor) -> None:
        """One broadcast of a contiguous CPU tensor."""
        if self._stream is not None:
            self._stream.send(flat, TIMEOUT_S)
        elif self._group is not None:
            self._group.broadcast(flat, _SENDER_RANK)

    def close(self) -> None:
        """Leaves the group; the peer ends."""
        if self._stream is not None:
            self._stream.close()
        self._group = None


def main(argv: Sequence[str]) -> int:
    """Receives until the sender has gone."""
    transport, memory, port, *sizes = argv
    kept = [torch.ones(int(size), dtype=torch.uint8) for size in sizes] if memory == KEPT else []
    receive: Callable[[torch.Tensor], None]
    if transport == OURS:
        stream = WeightListener(HOST, int(port), _SECRET).accept(TIMEOUT_S)
        receive = partial(stream.receive, timeout_s=TIMEOUT_S)
    else:
        receive = partial(_join(int(port), _RECEIVER_RANK).broadcast, src=_SENDER_RANK)
    while True:
        for buffer in kept or (torch.empty(int(size), dtype=torch.uint8) for size in sizes):
            try:
                receive(buffer)
            except (RuntimeError, OSError):
                return 0  # the sender has gone


def _connect(port: int) -> WeightStream:
    end = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return connect_stream(HOST, port, _SECRET, TIMEOUT_S)
        except ConnectionRefusedError:  # the peer is being started
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_S)


def _join(port: int, rank: int) -> GlooCommunicator:
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(HOST, port, rank=rank, world_size=2, store_timeout=int(TIMEOUT_S))
    return GlooCommunicator(group, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
