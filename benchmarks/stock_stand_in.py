"""The stand-in server for ms-swift's own client: the same answers after the same waits, weights as stock takes them.

``python -m benchmarks.stock_stand_in`` takes the options of ``stand_in_server``.
"""

from __future__ import annotations

import sys

from benchmarks import stand_in_server
from benchmarks.stock_weights import StockWeights
from swift_stage2.rollout_server import app
from swift_stage2.rollout_server.engine import Engine
from swift_stage2.rollout_server.service import RolloutService


class StockService(RolloutService):
    """A service without rounds."""

    def __init__(self, engine: Engine, host: str = "127.0.0.1") -> None:
        super().__init__(engine, host)
        self.rounds = StockWeights()  # type: ignore[assignment]


if __name__ == "__main__":
    app.RolloutService = StockService  # type: ignore[attr-defined]
    sys.exit(stand_in_server.main(sys.argv[1:]))
