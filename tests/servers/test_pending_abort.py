"""A pending round asks servers to abort: once at a time, rank 0 alone, never one that cannot abort."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_rollout_server import Answer, Call, FakeRolloutServer
from swift_stage2.servers.pending_abort import PendingAbort

from swift_stage2 import wire
from swift_stage2.servers import vllm_serve

_INFO = {"incarnation": "a", "state": "serving", "can_abort": True}


def _aborts(server: FakeRolloutServer) -> list[Any]:
    return [call.body for call in server.calls if call.path == wire.ABORT]


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as server:
        server.on_get = lambda call: Answer(body=json.dumps(_INFO).encode())
        server.on_reset = lambda call: Answer(body=b'{"aborted": 1}')
        yield server


@pytest.fixture
def make() -> Iterator[Callable[..., PendingAbort]]:
    made: list[PendingAbort] = []

    def build(**changes: Any) -> PendingAbort:
        settings: dict[str, Any] = {"enabled": True, "rank": 0, "api_key": "sk-key", "run_id": "run"}
        made.append(PendingAbort(**(settings | changes)))
        return made[-1]

    yield build
    for each in made:
        each.stop()


def test_it_names_the_run_and_the_version_whose_rollouts_are_to_end(
    server: FakeRolloutServer, make: Callable[..., PendingAbort]
) -> None:
    make().ask([server.url], version=7)
    server.wait_until(lambda: bool(_aborts(server)))
    assert _aborts(server) == [{"run_id": "run", "version": 7}]
    assert server.calls[-1].headers["Authorization"] == "Bearer sk-key"


def test_a_stock_server_is_not_asked_and_a_dead_one_is_no_error(
    server: FakeRolloutServer, make: Callable[..., PendingAbort]
) -> None:
    stock_calls: list[Call] = []

    def not_found(call: Call) -> Answer:
        stock_calls.append(call)
        return Answer(status=404)

    abort = make()
    with FakeRolloutServer(on_get=not_found) as stock:
        for _ in range(2):
            abort.ask(["http://127.0.0.1:1", stock.url, server.url], version=1)
            assert abort._asking is not None
            abort._asking.result(20)
        assert _aborts(stock) == []
    assert [call.path for call in stock_calls] == [wire.SERVER_INFO, vllm_serve.WEIGHT_INFO]
    assert len(_aborts(server)) == 2


@pytest.mark.parametrize("settings", [{"rank": 1}, {"enabled": False}])
def test_other_ranks_and_a_run_that_waits_ask_nothing(
    server: FakeRolloutServer, make: Callable[..., PendingAbort], settings: dict[str, Any]
) -> None:
    abort = make(**settings)
    abort.ask([server.url], version=1)
    assert abort._asking is None
    assert server.calls == []
