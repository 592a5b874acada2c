"""Makes each round's way for weights: a stream, a learner's memory file, or a directory.

Streams and directories fill the engine's buffers, and whoever still writes into those of an earlier round keeps them.
Called by ``WeightRounds``; decides nothing about rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swift_stage2.errors import RoundFailed, RoundRefused
from swift_stage2.rollout_server.disk_weights import DiskWeights
from swift_stage2.rollout_server.engine import Engine
from swift_stage2.rollout_server.staging import StagingBuffers
from swift_stage2.rollout_server.weight_receiver import WeightReceiver
from swift_stage2.wire import RefusalReason, RoundRequest


class Receivers:
    """Those of one server. Called under the lock of ``WeightRounds``, but for what ``directory`` returns."""

    def __init__(
        self, engine: Engine, host: str, weights_root: Path | None, is_loading: Callable[[], bool]
    ) -> None:
        """``is_loading``: whether the engine may still read the buffers."""
        self._engine = engine
        self._host = host
        self._weights_root = weights_root
        self._is_loading = is_loading
        self._writers: list[WeightReceiver | DiskWeights] = []  # that may write into the engine's buffers

    def stream(self, port: int, timeout_s: float) -> WeightReceiver:
        """One that does not listen yet. Raises RoundFailed: there is no memory to receive into."""
        receiver = WeightReceiver(self._host, port, timeout_s, self._unused_staging())
        self._writers.append(receiver)
        return receiver

    def directory(self, name: str, request: RoundRequest) -> Callable[[], DiskWeights]:
        """A function that looks for that directory, without the lock, because a disk may take long.

        Raises:
            RoundRefused: this server reads none.
            RoundFailed: as ``stream``; the function also as ``DiskWeights``.
        """
        if (root := self._weights_root) is None:
            raise RoundRefused(
                RefusalReason.WRONG_ORDER,
                "the server must be told where to read weights, got no --weights-root; start it with one",
            )
        staging = self._unused_staging()

        def find() -> DiskWeights:
            receiver = DiskWeights(root, name, request, staging)
            self._writers.append(receiver)
            return receiver

        return find

    def _unused_staging(self) -> StagingBuffers:
        is_stuck = not all(writer.join(0) for writer in self._writers)
        try:
            if is_stuck or self._is_loading():  # the old one may still be written or read
                self._engine.renew_staging()
        except OSError as error:
            raise RoundFailed(f"the server has no memory to receive weights into: {error}") from error
        self._writers.clear()
        return self._engine.staging
