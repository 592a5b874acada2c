"""One of two gloo ranks whose snapshot gets stuck on one of them; started by ``test_process_watches.py``.

The snapshot is the real one. ``gather`` and ``canary``: rank 1 fails inside what both must do together, before it meets
rank 0 there. ``main_thread``: rank 0 alone blocks for ever while it reads weights. Ends as ``train`` does.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from stand_in_canary import StandInCanary
from two_rank_learner import RANK, GatheredExport, StandInPublisher
from weight_updates import make_updates

from swift_stage2.collectives import join_control_group
from swift_stage2.errors import WeightSyncError, WeightSyncHang
from swift_stage2.runtime.background import EXIT_HANG
from swift_stage2.weights import snapshots
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import CanaryAnswer

TIMEOUT_S = 4.0
COLLECTIVES_S = 300.0  # far longer than the test waits


class FailsInAGather(GatheredExport):
    def _gathered(self, own: Any) -> Any:
        if RANK == 1 and self.num_gathers == 2:
            raise RuntimeError("no memory")
        return super()._gathered(own)


class FailsInTheCanary(StandInCanary):
    def answer(self) -> CanaryAnswer:
        if RANK == 1:
            raise RuntimeError("no memory")
        dist.all_reduce(torch.ones(1))
        return super().answer()


class BlocksInACall(WeightExport):
    def read(self, names: Any) -> Any:
        ours, _theirs = socket.socketpair()
        ours.recv(1)  # as a call to a device that never answers: outside of Python, its lock let go
        raise AssertionError("nobody writes")


def main(scenario: str) -> int:
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)
    limit = datetime.timedelta(seconds=COLLECTIVES_S)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=limit)
    module = torch.nn.ParameterList([torch.ones(512, 512) for _ in range(4)])
    exports = {"gather": FailsInAGather, "canary": GatheredExport, "main_thread": BlocksInACall}
    snapshots.ROUND_MARGIN_S = 1.0
    control = join_control_group(COLLECTIVES_S)
    sync = make_updates(
        exports[scenario](module),
        StandInPublisher(),
        control=control,
        canary=FailsInTheCanary() if scenario == "canary" else StandInCanary(),
        timeout_s=TIMEOUT_S,
    )
    try:
        sync.begin([0])
        with sync.snapshots.explained():  # as the step's agreement, in which a rank waits for the other
            control.reduce_max([0])
        sync.look()
    except WeightSyncHang as hang:
        print(f"raised: {hang}", file=sys.stderr, flush=True)
        os._exit(EXIT_HANG)  # torch's own end could wait for the group
    except WeightSyncError as error:
        print(f"learner's fault: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
