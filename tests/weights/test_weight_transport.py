"""Connections that are kept between pushes with a stock server, and when they must not be used again."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
from fake_rollout_server import LONGEST_WAIT_S, Answer, FakeRolloutServer, json_answer
from weight_updates import delivery, make_updates, mark_suspect, server_at

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.servers import vllm_serve
from swift_stage2.servers.session import Deadline
from swift_stage2.weights import publisher as weight_publisher
from swift_stage2.weights import stock_transport
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.stock_transport import StockTransport
from swift_stage2.weights.transport import WeightTransport
from swift_stage2.weights.waited_updates import WaitedUpdates


class RecordedTransport(WeightTransport):
    """Notes what is done with it; ``send`` waits for ``let_go``."""

    def __init__(self, server: FakeRolloutServer, let_go: threading.Event | None = None) -> None:
        self._server, self._let_go = server, let_go
        self.num_pushes = 0
        self.asked_before: list[str] = []
        self.closed_by: str | None = None

    def open(self, *_: object) -> str:
        self.num_pushes += 1
        self.asked_before = [call.path for call in self._server.calls]
        return "test"

    def carry(self, *_: object) -> None:
        if self._let_go is not None:
            self._let_go.wait(20)

    def is_lost(self) -> bool:
        return False

    def close(self, deadline: Deadline) -> None:
        self.closed_by = threading.current_thread().name


def _sync(server: FakeRolloutServer, made: list[Any], make: Any, timeout_s: float = 20.0) -> WaitedUpdates:
    def make_transport(info: wire.ServerInfo) -> Any:
        made.append(make())
        return made[-1]

    publisher = ThreadPublisher([server_at(server.url, 51216)], make_transport)
    return make_updates(torch.nn.Linear(2, 2), publisher, timeout_s=timeout_s)


def test_what_connects_to_a_server_that_became_suspect_is_not_used_again(server: FakeRolloutServer) -> None:
    """It may come back as another process: a broadcast to the one before would never end."""
    made: list[RecordedTransport] = []
    sync = _sync(server, made, lambda: RecordedTransport(server))
    assert sync.run([0]).proven == (0,)
    assert sync.run([0]).proven == (0,)
    (first,) = made
    assert first.num_pushes == 2

    mark_suspect(sync, 0)
    assert sync.run([0]).proven == (0,)
    assert first.num_pushes == 2
    assert first.closed_by is not None
    assert made[-1].num_pushes == 1
    sync.close()


def test_a_stock_server_answers_an_ordered_call_before_anything_is_pushed(server: FakeRolloutServer) -> None:
    made: list[RecordedTransport] = []
    _sync(server, made, lambda: RecordedTransport(server)).run([0])
    assert made[0].asked_before == [
        wire.SERVER_INFO,
        vllm_serve.WEIGHT_INFO,
        wire.RESET_PREFIX_CACHE,
        wire.WEIGHT_SUMS,
    ]


def test_a_stock_server_that_still_computes_gets_no_weights(server: FakeRolloutServer) -> None:
    server.on_reset = lambda call: json_answer({"message": "status: False"})
    made: list[RecordedTransport] = []
    outcome = _sync(server, made, lambda: RecordedTransport(server)).run([0])
    assert outcome.failed == (0,)
    assert not made


def test_a_transport_that_a_hung_push_is_inside_of_is_left_alone(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_publisher, "_LAST_CALL_S", 0.1)
    let_go = threading.Event()
    made: list[RecordedTransport] = []
    sync = _sync(server, made, lambda: RecordedTransport(server, let_go), timeout_s=3.0)
    try:
        report = sync.run([0]).reports[0]
        assert report.error == "the server did not take and prove the weights within 3 s"
        sync.close()
        assert made[0].closed_by is None
    finally:
        let_go.set()


class Broadcasting:
    """NCCL's communicator, whose transfer never ends unless it is destroyed."""

    rank = 1

    def __init__(self, store: Any) -> None:
        self.group = types.SimpleNamespace(store=store)
        self.num_destroyed = 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None: ...

    def destroy(self) -> None:
        self.num_destroyed += 1


def test_a_server_that_is_lost_in_a_transfer_is_noticed_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stock_transport, "_LOOK_FOR_LOST_S", 0.01)
    owner = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    member = torch.distributed.TCPStore("127.0.0.1", owner.port, is_master=False)
    communicator = Broadcasting(member)
    owners, num_queries = [owner], []
    del owner

    class Event:
        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            num_queries.append(1)
            if len(num_queries) == 100:  # the server answers for a while
                assert not communicator.num_destroyed
                owners.clear()
            return communicator.num_destroyed > 0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    transport = StockTransport(torch.device("cuda"))
    monkeypatch.setattr(transport, "_own_stream", lambda: None)
    transport._communicator = communicator
    deadline = Deadline(LONGEST_WAIT_S)
    with pytest.raises(ServerFault, match="the server was lost while weights were sent"):
        transport._send_on_stream(torch.zeros(1), deadline)
    assert not deadline.expired
    assert communicator.num_destroyed == 1


@pytest.mark.parametrize("size", ["true", "100000000000", "0"])
def test_a_world_size_that_is_none_is_the_servers_fault(server: FakeRolloutServer, size: str) -> None:
    server.on_get = lambda call: Answer(body=f'{{"world_size": {size}}}'.encode())
    with pytest.raises(ServerFault, match="get_world_size"):
        StockTransport(torch.device("cpu")).open(delivery(server_at(server.url, 51216)))
    assert [call.path for call in server.calls] == [wire.WORLD_SIZE]


def test_a_stock_server_is_not_asked_to_join_where_the_learner_cannot_come(server: FakeRolloutServer) -> None:
    """Its worker would wait for minutes, and every call to it behind that."""
    transport = StockTransport(torch.device("cpu"))
    told = r"at nowhere\.invalid:51216: .*write rollout\.servers\[\]\.group_host"
    with pytest.raises(ServerFault, match=told):
        transport.open(delivery(server_at(server.url, 51216, group_host="nowhere.invalid")))
    assert server.calls == []
