"""The plugin's hooks in stand-ins for ms-swift's server and client, and what a push makes of the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_rollout_server import Answer, Call, FakeRolloutServer
from fastapi import FastAPI
from starlette.testclient import TestClient
from test_vllm_weights import Worker, arrived, make_weights
from weight_updates import make_spec

from swift_stage2 import wire
from swift_stage2.config import Proof
from swift_stage2.errors import ServerFault
from swift_stage2.rollout_server.vllm_weights import combine
from swift_stage2.servers.session import ServerSession
from swift_stage2.servers.stock import WeightSums, ask_sums_incarnation
from swift_stage2.stock_proof.sums_server import register_server
from swift_stage2.weights.proof import prove_server


class Pipe:
    """To a process of ms-swift's that runs an engine: it answers None when a call failed."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._replies: list[Any] = []

    def send(self, command: dict[str, Any]) -> None:
        try:
            self._replies.append(getattr(self._engine, command["method"])(*command["args"]))
        except RuntimeError:
            self._replies.append(None)

    def poll(self, timeout: float) -> bool:
        return bool(self._replies)

    def recv(self) -> Any:
        return self._replies.pop(0)


class StuckPipe(Pipe):
    """Its engine takes the call and never answers."""

    def send(self, command: dict[str, Any]) -> None: ...


def make_program() -> Any:
    """As much of ms-swift's module as the plugin touches."""

    class GRPOVllmEngine:
        def __init__(self, model: str, *, engine_kwargs: dict[str, Any] | None = None) -> None:
            self.model, self.engine_kwargs = model, engine_kwargs
            self.use_async_engine = False
            self.engine: Any = None

    class SwiftRolloutDeploy:
        def __init__(self, connections: list[Pipe], num_workers: int) -> None:
            self.app, self.connections = FastAPI(), connections
            self.args = SimpleNamespace(vllm_tensor_parallel_size=1, vllm_data_parallel_size=num_workers)
            self._register_rl_rollout_app()

        def _require_api_key(self) -> Callable[[], None]:
            return lambda: None

        def _register_rl_rollout_app(self) -> None:
            self.app.get("/health/")(lambda: {"status": "ok"})

    return SimpleNamespace(GRPOVllmEngine=GRPOVllmEngine, SwiftRolloutDeploy=SwiftRolloutDeploy)


def make_engine(program: Any, worker: Worker | None) -> Any:
    engine = program.GRPOVllmEngine("model", engine_kwargs={"worker_extension_cls": "ms-swift's", "seed": 1})

    def collective_rpc(method: str, args: tuple[str]) -> list[Any]:
        assert method == "stage2_weight_sums"
        if worker is None:
            raise RuntimeError("the worker has died")
        return [worker.report(*args)]

    engine.engine = SimpleNamespace(collective_rpc=collective_rpc)
    return engine


def test_the_route_asks_every_engine_and_leaves_the_others_alone() -> None:
    program, weights = make_program(), make_weights()
    register_server(program)
    workers = [Worker(), Worker()]
    for worker in workers:
        worker.push(weights)
    pipes = [Pipe(make_engine(program, worker)) for worker in workers]
    with TestClient(program.SwiftRolloutDeploy(pipes, 2).app) as http:
        assert http.get("/health/").json() == {"status": "ok"}
        about = http.get(wire.WEIGHT_SUMS).json()
        told = WeightSums.from_json(http.post(wire.WEIGHT_SUMS).json())
        assert about == {"incarnation": told.incarnation}
        assert told.problems(arrived(weights)) == []


def test_an_engine_that_never_answers_ends_the_call_by_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_stage2.stock_proof.sums_server._ANSWER_S", 0.1)
    program = make_program()
    register_server(program)
    pipes = [Pipe(make_engine(program, Worker())), StuckPipe(None)]
    with TestClient(program.SwiftRolloutDeploy(pipes, 2).app) as http:
        reply = http.post(wire.WEIGHT_SUMS)
    assert (reply.status_code, reply.json()["detail"]) == (
        503,
        "an engine does not answer; start the server again",
    )


def stock_with_sums(
    worker: Worker, *, incarnations: tuple[str, str] = ("process", "process")
) -> FakeRolloutServer:
    def about(call: Call) -> Answer:
        if call.path != wire.WEIGHT_SUMS:
            return Answer(404)
        return Answer(body=json.dumps({"incarnation": incarnations[0]}).encode())

    def sums(call: Call) -> Answer:
        assert call.path == wire.WEIGHT_SUMS
        return Answer(
            body=json.dumps(combine(incarnations[1], "?", [[worker.report()]], 1).to_json()).encode()
        )

    return FakeRolloutServer(on_get=about, on_reset=sums)


def proven_by(server: FakeRolloutServer, sent: dict[str, str]) -> str:
    spec = make_spec(20.0, proof=Proof.CHECKSUM)
    with ServerSession(server.url) as session:
        sums_of = ask_sums_incarnation(session, spec.deadline)
        return prove_server(session, spec, wire.ServerInfo(stock=True), sent, sums_of=sums_of)


def test_a_push_believes_a_stock_server_that_shows_checksums() -> None:
    worker, weights = Worker(), make_weights()
    worker.push(weights)
    with stock_with_sums(worker) as server:
        assert proven_by(server, arrived(weights)) == "checksums"
        with pytest.raises(ServerFault, match="arrived checksum of norm differs"):
            proven_by(server, arrived({**weights, "norm": torch.zeros(3)}))
    with FakeRolloutServer() as server, pytest.raises(ServerFault, match="no checksums"):
        proven_by(server, {})


def test_a_stock_server_that_was_restarted_during_the_push_is_not_believed() -> None:
    worker, weights = Worker(), make_weights()
    worker.push(weights)
    with (
        stock_with_sums(worker, incarnations=("one", "other")) as server,
        pytest.raises(ServerFault, match="restarted during the push"),
    ):
        proven_by(server, arrived(weights))
