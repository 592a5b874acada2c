"""Takes weights as a stock ``swift rollout`` takes them from ms-swift's own client, over gloo, and loads them nowhere.

One communicator for a whole run, each bucket announced by HTTP before its broadcast, no rounds and no proof. Stands
behind the routes in the place of ``WeightRounds``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from swift_stage2.collectives import GlooCommunicator
from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.weight_receiver import Bucket
from swift_stage2.rollout_server.weight_rounds import RoundState

_LOOPBACK = "127.0.0.1"
_SERVER_RANK, _LEARNER_RANK, _NUM_MEMBERS = 0, 1, 2
_TIMEOUT_S = 60.0


class StockWeights:
    """What the routes ask of a server's weights. Its thread joins communicators and receives, in order."""

    state = RoundState.SERVING

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stock-weights")
        self._communicator: Any = None
        self._under_way: list[Future[None]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def admission(self, round_id: str | None) -> Iterator[bool]:
        """A stock server answers always, proven or not; it is for the client not to ask while it pushes."""
        yield False

    def open_receiver(self, port: int, timeout_s: float) -> str:
        """Returns before anybody can connect, as stock does, and has no secret. Listens on loopback only."""
        self.close_receiver()
        self._under_way = [self._thread.submit(self._join, port)]
        return ""

    def expect(self, bucket: Bucket) -> None:
        """Announces the next broadcast."""
        self._under_way.append(self._thread.submit(self._receive, bucket.num_bytes))

    def load(self, given_up: threading.Event) -> tuple[str, ...]:
        """Waits until all that was announced has arrived.

        Raises:
            RoundFailed: it did not.
        """
        under_way, self._under_way = self._under_way, []
        try:
            for each in under_way:
                each.result(timeout=_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise RoundFailed(f"weights must arrive within {_TIMEOUT_S:.0f} s: {error!r}") from error
        return ()

    def close_receiver(self) -> None:
        """Lets the communicator go, and its port with it."""
        self._thread.submit(self._leave).result(timeout=2 * _TIMEOUT_S)
        self._under_way = []

    def close(self) -> None:
        """Begins nothing any more; what is under way ends with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _join(self, port: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(
            _LOOPBACK, port, rank=_SERVER_RANK, world_size=_NUM_MEMBERS, store_timeout=int(_TIMEOUT_S)
        )
        self._communicator = GlooCommunicator(group, timeout_s=_TIMEOUT_S)

    def _receive(self, num_bytes: int) -> None:
        if self._communicator is None:
            raise RuntimeError("nobody has joined; /init_communicator/ comes first")
        if self._buffer.numel() != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._communicator.broadcast(self._buffer, src=_LEARNER_RANK)
        self._communicator.group.barrier()

    def _leave(self) -> None:
        self._communicator = None
