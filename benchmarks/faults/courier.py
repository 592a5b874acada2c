"""The process that carries the weights of a job of the bench: the product's own, which commits faults on demand.

``python -m benchmarks.faults.courier FD PARENT`` takes the place of ``swift_stage2.weights.courier_worker``; the plugin
of the bench's jobs sees to that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.faults.commit import PushFault, Switch, Switches
from swift_stage2.servers.protocol import ServerInfo
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights import courier_worker
from swift_stage2.weights.courier_worker import CourierSetup, CourierWorker, Errand
from swift_stage2.weights.disk_manifest import MANIFEST
from swift_stage2.weights.disk_rounds import RoundOnDisk
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.snapshot import PackedBucket
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

_HELD_BUCKET = 1
_LONGEST_HOLD_S = 30.0


class PushHistory:
    """The buckets of the present and of the last round; outlives transports, which may be made anew for each.

    Two sets of buffers take turns: memory that comes and goes with every round would look like a leak.
    """

    def __init__(self) -> None:
        self.last: list[torch.Tensor] = []
        self.present: list[torch.Tensor] = []

    def begin_round(self) -> None:
        self.last, self.present = self.present, self.last

    def keep(self, number: int, flat: torch.Tensor) -> None:
        """Copies one bucket of the present round; ``number`` counts from 0."""
        if number < len(self.present) and self.present[number].shape == flat.shape:
            self.present[number].copy_(flat)
        else:
            self.present[number:] = [flat.clone()]


class FaultyTransport(WeightTransport):
    """A real transport; ``switches`` say what becomes of what it is given."""

    def __init__(self, real: WeightTransport, switches: Switches, history: PushHistory) -> None:
        self._real = real
        self._switches = switches
        self._history = history
        self._num_sent = 0

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> str:
        self._num_sent = 0
        self._history.begin_round()
        return self._real.open(session, endpoint, deadline)

    @contextmanager
    def announce(
        self, session: ServerSession, bucket: PackedBucket, offset: int, deadline: Deadline
    ) -> Iterator[Iterable[torch.Tensor]]:
        with self._real.announce(session, bucket, offset, deadline) as parts:
            yield parts

    def finish(self, session: ServerSession, order: RoundOrder, sent: Mapping[str, str]) -> None:
        self._real.finish(session, order, sent)

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        fault, number = self._switches.read(Switch.PUSH), self._num_sent
        self._num_sent += 1
        if fault == PushFault.HOLD and number == _HELD_BUCKET:
            self._switches.set(Switch.PUSH_HELD)
            self._switches.wait(Switch.PUSH_RELEASED, _LONGEST_HOLD_S)
        elif fault == PushFault.ZEROS:
            flat = torch.zeros_like(flat)
        elif fault == PushFault.REPEAT:
            flat = self._history.last[number]
        self._history.keep(number, flat)
        self._real.send(flat, deadline)

    def is_lost(self) -> bool:
        return self._real.is_lost()

    def close(self, deadline: Deadline) -> None:
        self._real.close(deadline)


class FaultyCourier(CourierWorker):
    """Wraps every transport of the real one, and is killed in the middle of an errand when the bench wants it."""

    def __init__(self, connection: Connection, setup: CourierSetup) -> None:
        super().__init__(connection, setup)
        self._switches = Switches.from_environment()
        self._history = PushHistory()
        if self._disk is not None:
            self._disk.store = partial(store_and_tear, self._disk.store, self._switches)  # type: ignore[method-assign]

    def _begin(self, errand: Errand) -> None:
        if after_s := self._switches.read(Switch.KILL_COURIER):
            self._switches.clear(Switch.KILL_COURIER)
            threading.Timer(float(after_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
        super()._begin(errand)

    def _make_transport(self, info: ServerInfo) -> WeightTransport:
        return FaultyTransport(super()._make_transport(info), self._switches, self._history)


def store_and_tear(
    store: Callable[[RoundOnDisk, Deadline], Path],
    switches: Switches,
    round_: RoundOnDisk,
    deadline: Deadline,
) -> Path:
    """Stores the round, and tears what it has written where the bench wants it."""
    directory = store(round_, deadline)
    if switches.read(Switch.PUSH) == PushFault.TEAR:
        manifest = directory / MANIFEST
        os.truncate(manifest, manifest.stat().st_size // 2)
    return directory


if __name__ == "__main__":
    courier_worker.CourierWorker = FaultyCourier  # type: ignore[misc]
    courier_worker.main(int(sys.argv[1]), int(sys.argv[2]))
