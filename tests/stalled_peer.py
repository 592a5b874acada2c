"""A server's end of a weight transport, as a process that a test freezes or kills: ``ours PORT`` or ``stock``.

``ours`` lets the learner in that knows SECRET, takes a part of its file, half of it late, and freezes itself: no FIN,
nothing read. ``stock`` is the master of the store that a stock server's worker holds, and prints its port.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore

from swift_stage2.weights import stream
from swift_stage2.weights.stream import WeightListener

LIFETIME_S = 60.0
SECRET = "5" * 64
PART_BYTES = 1 << 20
TAKES_THE_SECOND_AFTER_S = 3.0


def take_a_part(port: int) -> None:
    really_fill = stream._fill

    def fill(connection: socket.socket, memory: memoryview, end: float) -> None:
        if len(memory):  # the secret
            really_fill(connection, memory, end)
            return
        for wait_s in (TAKES_THE_SECOND_AFTER_S, 0.0):
            taken = 0
            while taken < PART_BYTES:
                taken += len(connection.recv(PART_BYTES - taken))
            threading.Event().wait(wait_s)
        os.kill(os.getpid(), signal.SIGSTOP)

    listener = WeightListener("127.0.0.1", port, SECRET)
    stream._fill = fill
    print("listens", flush=True)
    listener.receive(memoryview(b""), LIFETIME_S)


def hold_the_store() -> None:
    timeout = timedelta(seconds=LIFETIME_S)
    store = TCPStore("127.0.0.1", 0, 2, True, timeout=timeout, wait_for_workers=False, use_libuv=False)
    print(store.port, flush=True)
    threading.Event().wait(LIFETIME_S)


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        take_a_part(int(sys.argv[2]))
    else:
        hold_the_store()
