"""One member of a weight group over gloo, a stock server's worker or the learner: ``gloo_member.py RANK HOST PORT``.

Rank 0 keeps the store and binds HOST, rank 1 connects to HOST and sends. Prints the sum of what arrived or was sent.
"""

from __future__ import annotations

import datetime
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from swift_stage2.collectives import GlooCommunicator

_TIMEOUT_S = 60.0
_NUM_ELEMENTS = 1 << 18


def main(rank: int, host: str, port: int) -> None:
    store = dist.TCPStore(
        host,
        port,
        2,
        is_master=rank == 0,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        wait_for_workers=False,
    )
    group = SimpleNamespace(rank=rank, world_size=2, store=store)  # what is used of vLLM's
    communicator = GlooCommunicator(group, timeout_s=_TIMEOUT_S)
    flat = torch.arange(_NUM_ELEMENTS) if rank == 1 else torch.zeros(_NUM_ELEMENTS, dtype=torch.int64)
    communicator.broadcast(flat, 1)
    print(int(flat.sum()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
