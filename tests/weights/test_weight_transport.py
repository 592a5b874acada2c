"""Connections that are kept between rounds with a stock server, and when they must not be used again."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dropping_port import AnyCanary
from fake_rollout_server import Answer, FakeRolloutServer, outputs

from swift_stage2.collectives import SingleRank
from swift_stage2.errors import ServerFault, WeightSyncError, WeightSyncHang
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights import transport as weight_transport
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import ServerEndpoint, WeightSync
from swift_stage2.weights.transport import StockTransport


class RecordedTransport:
    """Notes what is done with it; ``send`` waits for ``let_go``."""

    def __init__(self, server: FakeRolloutServer, let_go: threading.Event | None = None) -> None:
        self._server, self._let_go = server, let_go
        self.num_rounds = 0
        self.asked_before: list[str] = []
        self.closed_by: str | None = None

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None:
        self.num_rounds += 1
        self.asked_before = [call.path for call in self._server.calls]

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        if self._let_go is not None:
            self._let_go.wait(20)

    def is_lost(self) -> bool:
        return False

    def close(self, deadline: Deadline) -> None:
        self.closed_by = threading.current_thread().name


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    one_token = {
        "response": {
            "choices": [{"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1]}],
            "prompt_token_ids": [1],
        }
    }
    with FakeRolloutServer(on_infer=lambda call: outputs([one_token])) as server:
        yield server


def _sync(server: FakeRolloutServer, made: list[Any], make: Any, timeout_s: float = 20.0) -> WeightSync:
    def make_transport(info: protocol.ServerInfo) -> Any:
        made.append(make())
        return made[-1]

    return WeightSync(
        [ServerEndpoint(server.url, 51216)],
        control=SingleRank(),
        export=WeightExport(torch.nn.Linear(2, 2)),
        canary=AnyCanary(),
        make_transport=make_transport,
        run_id="run",
        timeout_s=timeout_s,
        bucket_mib=1,
    )


def test_what_connects_to_a_server_that_became_suspect_is_not_used_again(server: FakeRolloutServer) -> None:
    """It may come back as another process: a broadcast to the one before would never end."""
    made: list[RecordedTransport] = []
    sync = _sync(server, made, lambda: RecordedTransport(server))
    assert sync.run(1, [0]).proven == (0,)
    assert sync.run(2, [0]).proven == (0,)
    first = sync._transports[0]
    assert isinstance(first, RecordedTransport)
    assert first.num_rounds == 2

    sync.distrust([0])
    assert sync.run(3, [0]).proven == (0,)
    assert first.num_rounds == 2
    assert first.closed_by is not None
    assert sync._transports[0] is not first
    sync.close()


def test_a_stock_server_answers_an_ordered_call_before_anything_is_pushed(server: FakeRolloutServer) -> None:
    made: list[RecordedTransport] = []
    _sync(server, made, lambda: RecordedTransport(server)).run(1, [0])
    assert made[0].asked_before == [
        protocol.SERVER_INFO,
        protocol.RESET_PREFIX_CACHE,
        protocol.WEIGHT_SUMS,
        protocol.STATE_KEYS,
    ]


def test_a_stock_server_that_still_computes_gets_no_weights(server: FakeRolloutServer) -> None:
    server.on_reset = lambda call: Answer(body=json.dumps({"message": "status: False"}).encode())
    made: list[RecordedTransport] = []
    outcome = _sync(server, made, lambda: RecordedTransport(server)).run(1, [0])
    assert outcome.failed == (0,)
    assert not made


def test_a_transport_that_a_hung_push_is_inside_of_is_left_alone(server: FakeRolloutServer) -> None:
    let_go = threading.Event()
    made: list[RecordedTransport] = []
    sync = _sync(server, made, lambda: RecordedTransport(server, let_go), timeout_s=1.0)
    try:
        with pytest.raises(WeightSyncHang, match="did not return within"):
            sync.run(1, [0])
        sync.close()
        assert made[0].closed_by is None
    finally:
        let_go.set()


def test_the_servers_communicator_is_closed_although_the_session_that_opened_it_has_ended(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils: Any = types.ModuleType("vllm.distributed.utils")
    utils.StatelessProcessGroup = types.SimpleNamespace(create=lambda **_: object())
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    for package in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setattr(weight_transport, "GlooCommunicator", lambda group, timeout_s: object())
    server.on_get = lambda call: Answer(body=b'{"world_size": 1}')
    transport = StockTransport(torch.device("cpu"), api_key="key")
    with ServerSession(server.url, "key") as session:
        transport.open(session, ServerEndpoint(server.url, 51216), Deadline(5.0))
    transport.close(Deadline(5.0))
    last = server.calls[-1]
    assert last.path == protocol.CLOSE_COMMUNICATOR
    assert last.headers["Authorization"] == "Bearer key"
    transport.close(Deadline(5.0))
    assert server.calls[-1] is last


def test_a_communicator_that_sends_nothing_is_the_learners_fault(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's is switched off by VLLM_DISABLE_PYNCCL, and where it finds no NCCL, without an error."""
    utils: Any = types.ModuleType("vllm.distributed.utils")
    utils.StatelessProcessGroup = types.SimpleNamespace(create=lambda **_: object())
    pynccl: Any = types.ModuleType("vllm.distributed.device_communicators.pynccl")
    pynccl.PyNcclCommunicator = lambda group, device: types.SimpleNamespace(disabled=True)
    for module in (utils, pynccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for package in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    server.on_get = lambda call: Answer(body=b'{"world_size": 1}')
    transport = StockTransport(torch.device("cuda", 0))
    with (
        ServerSession(server.url, None) as session,
        pytest.raises(WeightSyncError, match="unset VLLM_DISABLE_PYNCCL"),
    ):
        transport.open(session, ServerEndpoint(server.url, 51216), Deadline(5.0))
    transport.close(Deadline(5.0))


@pytest.mark.parametrize("size", ["true", "100000000000", "0"])
def test_a_world_size_that_is_none_is_the_servers_fault(server: FakeRolloutServer, size: str) -> None:
    server.on_get = lambda call: Answer(body=f'{{"world_size": {size}}}'.encode())
    endpoint = ServerEndpoint(server.url, 51216)
    with ServerSession(server.url) as session, pytest.raises(ServerFault, match="get_world_size"):
        StockTransport(torch.device("cpu")).open(session, endpoint, Deadline(5.0))
    assert [call.path for call in server.calls] == [protocol.WORLD_SIZE]


def test_a_stock_server_is_not_asked_to_join_where_the_learner_cannot_come(server: FakeRolloutServer) -> None:
    """Its worker would wait for minutes, and every call to it behind that."""
    transport = StockTransport(torch.device("cpu"))
    endpoint = ServerEndpoint(server.url, 51216, group_host="nowhere.invalid")
    with (
        ServerSession(server.url) as session,
        pytest.raises(
            ServerFault, match=r"at nowhere\.invalid:51216: .*write rollout\.servers\[\]\.group_host"
        ),
    ):
        transport.open(session, endpoint, Deadline(5.0))
    assert server.calls == []
