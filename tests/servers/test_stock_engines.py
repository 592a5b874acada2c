"""Pushes and the health check ask a stock server with several engines, through ms-swift's own routes."""

from __future__ import annotations

import pytest
from stock_engines import StandInEngine, stock_server
from weight_updates import make_spec

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import require_workers
from swift_stage2.weights.proof import CanaryAnswer, prove_server

AMPLE_S = 60.0
OLD_WEIGHTS = (9, 9)


CANARY = CanaryAnswer({"messages": [{"role": "user", "content": "canary"}]}, {"temperature": 0}, (5, 6))


def prove(*engines: StandInEngine, tensor_parallel_size: int = 1) -> str:
    with (
        stock_server(*engines, tensor_parallel_size=tensor_parallel_size) as server,
        ServerSession(server.url) as session,
    ):
        return prove_server(session, make_spec(AMPLE_S, canary=CANARY), wire.ServerInfo(stock=True), {})


@pytest.mark.parametrize(("num_engines", "tensor_parallel_size"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_every_engine_is_asked_the_canary(num_engines: int, tensor_parallel_size: int) -> None:
    engines = [StandInEngine() for _ in range(num_engines)]
    assert prove(*engines, tensor_parallel_size=tensor_parallel_size) == "canary"
    assert all(engine.prompts == ["canary"] * tensor_parallel_size for engine in engines)


def test_one_engine_with_old_weights_is_no_proof() -> None:
    with pytest.raises(ServerFault, match="other tokens than the learner in 1 of 2 answers of its engines"):
        prove(StandInEngine(), StandInEngine(OLD_WEIGHTS))


@pytest.mark.parametrize(
    ("engines", "sound"),
    [
        ([StandInEngine(), StandInEngine()], True),
        ([StandInEngine(), StandInEngine(reset=None)], False),
        ([StandInEngine(keys=None)], False),
        ([StandInEngine(keys=((),))], False),
    ],
    ids=["sound", "engine failed", "workers failed", "no parameters"],
)
def test_an_answer_from_arguments_is_no_sign_of_life(engines: list[StandInEngine], sound: bool) -> None:
    with stock_server(*engines) as server, ServerSession(server.url) as session:
        if sound:
            require_workers(session, Deadline(AMPLE_S))
            return
        with pytest.raises(ServerFault, match="its engines or their workers have failed"):
            require_workers(session, Deadline(AMPLE_S))
