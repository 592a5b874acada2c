"""A server's end of a weight transport, as a process that a test freezes or kills: ``gloo PORT`` or ``stock``.

``gloo`` joins the group, takes two buckets, the second one late, and freezes itself: no FIN, nothing read. ``stock``
is the master of the store that a stock server's worker holds, and prints its port.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from swift_stage2.collectives import WeightGroup

LIFETIME_S = 60.0
BUCKET_BYTES = 1 << 20
TAKES_THE_SECOND_AFTER_S = 2.5


def take_two_buckets(port: int) -> None:
    is_told = threading.Event()

    def tell_once() -> bool:
        if not is_told.is_set():
            is_told.set()
            print("listens", flush=True)
        return True

    group = WeightGroup(WeightGroup.SERVER_RANK, "127.0.0.1", port, LIFETIME_S, tell_once)
    group.broadcast(torch.empty(BUCKET_BYTES, dtype=torch.uint8))
    threading.Event().wait(TAKES_THE_SECOND_AFTER_S)
    group.broadcast(torch.empty(BUCKET_BYTES, dtype=torch.uint8))
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_store() -> None:
    timeout = timedelta(seconds=LIFETIME_S)
    store = TCPStore("127.0.0.1", 0, 2, True, timeout=timeout, wait_for_workers=False, use_libuv=False)
    print(store.port, flush=True)
    threading.Event().wait(LIFETIME_S)


if __name__ == "__main__":
    if sys.argv[1] == "gloo":
        take_two_buckets(int(sys.argv[2]))
    else:
        hold_the_store()
