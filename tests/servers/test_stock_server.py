"""A stock server answers as ``swift rollout`` does, which 404 alone does not; with several engines each is asked."""

from __future__ import annotations

import pytest
from fake_rollout_server import Answer, Behaviour, FakeRolloutServer, json_answer
from stock_engines import StandInEngine, stock_server
from weight_updates import make_spec

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size, require_workers
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


@pytest.mark.parametrize(("first", "second", "proven"), [((5, 6), (9,), True), ((9,), (5, 6), False)])
def test_of_a_server_that_asks_again_the_first_turn_counts(
    first: tuple[int, ...], second: tuple[int, ...], proven: bool
) -> None:
    choice = {"message": {"content": ""}, "token_ids": second}
    record = {
        "response": {"choices": [choice], "prompt_token_ids": [1, *first, 2, 3]},
        "response_token_ids": [first, second],
    }
    with FakeRolloutServer() as running, ServerSession(running.url) as session:
        running.on_infer = lambda call: json_answer([record])
        spec = make_spec(AMPLE_S, canary=CANARY)
        if proven:
            assert prove_server(session, spec, wire.ServerInfo(stock=True), {}) == "canary"
        else:
            with pytest.raises(ServerFault, match="answers the canary with other tokens"):
                prove_server(session, spec, wire.ServerInfo(stock=True), {})


def world_size(body: bytes, status: int = 200) -> Behaviour:
    return lambda call: Answer(status, body) if call.path == wire.WORLD_SIZE else Answer(404)


def test_a_stock_server_tells_its_workers(server: FakeRolloutServer) -> None:
    server.on_get = world_size(b'{"world_size": 2}')
    with ServerSession(server.url) as session:
        assert ask_world_size(session, Deadline(5.0)) == 2


@pytest.mark.parametrize(
    ("behaviour", "foreign"),
    [
        (world_size(b"<html>", 404), True),
        (world_size(b"<html>welcome</html>"), True),
        (world_size(b'{"world_size": true}'), True),
        (world_size(b'{"world_size": 0}'), True),
        (world_size(b'{"world_size": 1000000000000}'), True),
        (world_size(b'["world_size"]'), True),
        (world_size(b"{}"), True),
        (world_size(b"loading", 503), False),
        (world_size(b"no key", 401), False),
        (lambda call: Answer(drop=True), False),
    ],
    ids=["404", "html", "boolean", "none", "huge", "list", "empty", "503", "401", "dropped"],
)
def test_what_answers_otherwise_is_no_stock_server(
    server: FakeRolloutServer, behaviour: Behaviour, foreign: bool
) -> None:
    server.on_get = behaviour
    with ServerSession(server.url) as session, pytest.raises(ServerFault) as caught:
        ask_world_size(session, Deadline(5.0))
    assert caught.value.is_foreign is foreign
