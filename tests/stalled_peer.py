"""A server's end of a weight transport, as a process that a test freezes or kills: ``ours PORT`` or ``stock``.

``ours`` lets the learner in that knows SECRET, takes two buckets, the second one late, and freezes itself: no FIN,
nothing read. ``stock`` is the master of the store that a stock server's worker holds, and prints its port.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from swift_stage2.weights.stream import WeightListener

LIFETIME_S = 60.0
SECRET = "5" * 64
BUCKET_BYTES = 1 << 20
TAKES_THE_SECOND_AFTER_S = 3.0


def take_two_buckets(port: int) -> None:
    listener = WeightListener("127.0.0.1", port, SECRET)
    print("listens", flush=True)
    stream = listener.accept(LIFETIME_S)
    stream.receive(torch.empty(BUCKET_BYTES, dtype=torch.uint8), LIFETIME_S)
    threading.Event().wait(TAKES_THE_SECOND_AFTER_S)
    stream.receive(torch.empty(BUCKET_BYTES, dtype=torch.uint8), LIFETIME_S)
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_store() -> None:
    timeout = timedelta(seconds=LIFETIME_S)
    store = TCPStore("127.0.0.1", 0, 2, True, timeout=timeout, wait_for_workers=False, use_libuv=False)
    print(store.port, flush=True)
    threading.Event().wait(LIFETIME_S)


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        take_two_buckets(int(sys.argv[2]))
    else:
        hold_the_store()
