"""The receiving end of a raw broadcast, as a process of its own; started by ``bench sync``.

``python -m swift_stage2.bench.raw_peer TRANSPORT MEMORY PORT NUM_BYTES…`` receives these buckets again and again
until the sender has gone. MEMORY is ``kept``: buffers are allocated and touched before the first broadcast; or
``new``: one is allocated for every broadcast, as stock ``swift rollout`` does, and its pages come while it is filled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from swift_stage2.collectives import GlooCommunicator, WeightGroup

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
OURS = "ours"
STOCK = "stock"
KEPT = "kept"
NEW = "new"


class RawSender:
    """The sending end: the transport's own group, and nothing around it."""

    def __init__(self, transport: str, port: int) -> None:
        self._group = _join(transport, port, WeightGroup.LEARNER_RANK)

    def send(self, flat: torch.Tensor) -> None:
        """One broadcast of a contiguous CPU tensor."""
        self._broadcast(flat)

    def _broadcast(self, flat: torch.Tensor) -> None:
        if isinstance(self._group, WeightGroup):
            self._group.broadcast(flat)
        else:
            self._group.broadcast(flat, WeightGroup.LEARNER_RANK)

    def close(self) -> None:
        """Leaves the group; the peer ends."""
        if isinstance(self._group, WeightGroup):
            self._group.close()
        del self._group


def main(argv: Sequence[str]) -> int:
    """Receives until the sender has gone."""
    transport, memory, port, *sizes = argv
    kept = [torch.ones(int(size), dtype=torch.uint8) for size in sizes] if memory == KEPT else []
    group = _join(transport, int(port), WeightGroup.SERVER_RANK)
    while True:
        for buffer in kept or (torch.empty(int(size), dtype=torch.uint8) for size in sizes):
            try:
                if isinstance(group, WeightGroup):
                    group.broadcast(buffer)
                else:
                    group.broadcast(buffer, WeightGroup.LEARNER_RANK)
            except RuntimeError:
                return 0  # the sender has gone


def _join(transport: str, port: int, rank: int) -> WeightGroup | GlooCommunicator:
    if transport == OURS:
        return WeightGroup(rank, HOST, port, TIMEOUT_S)
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(HOST, port, rank=rank, world_size=2, store_timeout=int(TIMEOUT_S))
    return GlooCommunicator(group, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
