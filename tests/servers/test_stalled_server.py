"""A server that stalls or dies without a word: its own fault within the push's time, and seen between pushes."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import speaking
from dropping_port import LINEAR, a_push_to_a_dropping_port, dropping_port
from fake_rollout_server import Answer, Call, FakeRolloutServer, json_answer
from stalled_peer import PART_BYTES, SECRET
from stopped_process import stop_process
from torch.distributed import TCPStore
from torchrun_job import free_port
from weight_updates import delivery, make_updates, server_at

from swift_stage2 import wire
from swift_stage2.config import Transport as Way
from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline
from swift_stage2.weights import stock_transport
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.stock_transport import StockTransport
from swift_stage2.weights.transport import OurTransport
from swift_stage2.weights.waited_updates import WaitedUpdates

pytestmark = [pytest.mark.slow, pytest.mark.ci]

CPU = torch.device("cpu")
ANSWER = wire.OfferAnswer(True, "listening", SECRET)
KILLED_BY_S = 60.0
T = 10.0  # of it 8 for calls; the second part is taken after 3, so a limit counted from there would pass T


def peer(*arguments: str) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """The process and its first line."""
    return speaking(Path(__file__).parents[1] / "stalled_peer.py", *arguments)


def answering_as_ours(manifest: tuple[wire.TensorSpec, ...]) -> FakeRolloutServer:
    info = wire.ServerInfo(stock=False, incarnation="one", state="serving", manifest=manifest)
    return FakeRolloutServer(
        on_get=lambda call: json_answer(info.to_json()),
        on_reset=lambda call: json_answer(ANSWER.to_json()),
    )


def sync_of(export: WeightExport, server: FakeRolloutServer, port: int) -> WaitedUpdates:
    publisher = ThreadPublisher([server_at(server.url, port)], lambda info: OurTransport(Way.TCP))
    return make_updates(export, publisher, timeout_s=T)


@pytest.mark.slow
def test_a_server_that_freezes_late_in_a_push_is_its_own_fault_within_the_calls_time() -> None:
    # More than the buffers of both ends hold behind what it takes.
    export = WeightExport(torch.nn.ParameterList([torch.ones(PART_BYTES) for _ in range(16)]))
    port = free_port()
    with answering_as_ours(export.manifest()) as server, peer("ours", str(port)) as (_, listens):
        assert listens == "listens"
        outcome = sync_of(export, server, port).run([0])
    assert outcome.failed == (0,)
    assert "lost while weights were sent" in str(outcome.reports[0].error)


def test_a_server_that_was_ours_and_answers_404_once_is_suspect_and_the_run_goes_on() -> None:
    """Taken for a stock one it would be sent weights over vLLM's group, which may not even be installed here."""
    export = WeightExport(torch.nn.Linear(2, 2))
    with answering_as_ours(export.manifest()) as server:
        sync = sync_of(export, server, free_port())
        sync.run([0])
        server.on_get = lambda call: Answer(status=404)
        outcome = sync.run([0])
    assert outcome.failed == (0,)
    assert "a server that was ours in this run must stay ours" in str(outcome.reports[0].error)


def kept(port: str) -> tuple[StockTransport, TCPStore]:
    """A stock transport after a push, its store's client connected to a real master."""
    timeout = timedelta(seconds=300)
    store = TCPStore(
        "127.0.0.1", int(port), 2, False, timeout=timeout, wait_for_workers=False, use_libuv=False
    )
    transport = StockTransport(CPU)
    transport._communicator = SimpleNamespace(
        rank=1,
        broadcast=lambda flat, src, timeout_s: None,
        destroy=lambda: None,
        # vLLM's barrier begins so: its own timeout does not bound it
        group=SimpleNamespace(store=store, barrier=lambda timeout_s: store.get("barrier_id")),
    )
    return transport, store


def test_a_stock_server_that_never_comes_to_the_barrier_ends_the_wait_for_its_key() -> None:
    with peer("stock") as (_, port):
        transport, store = kept(port)
        with pytest.raises(ServerFault, match="lost while weights were sent"):
            transport.send(torch.zeros(4, dtype=torch.uint8), Deadline(0.5))
        assert store.timeout <= timedelta(seconds=0.5)


def test_a_frozen_stock_server_keeps_no_push_although_its_store_never_answers() -> None:
    with peer("stock") as (process, port):
        transport, _ = kept(port)
        stop_process(process.pid)
        with pytest.raises(ServerFault, match="barrier did not end within"):
            transport.send(torch.zeros(4, dtype=torch.uint8), Deadline(0.5))


def test_a_kept_group_whose_server_died_is_lost_and_a_silent_one_is_not() -> None:
    publisher = ThreadPublisher([server_at("http://127.0.0.1:9", 10)], lambda info: OurTransport(Way.TCP))
    with peer("stock") as (process, port):
        transport, _ = kept(port)
        publisher._kept[0] = transport
        assert publisher.lost_servers() == ()
        stop_process(process.pid)
        assert publisher.lost_servers() == ()
        question = transport._question
        assert publisher.lost_servers() == ()
        assert question is not None
        assert transport._question is question, "a silent store is asked once"
        process.kill()
        process.wait(KILLED_BY_S)
        assert question.ended_within(KILLED_BY_S)
        assert publisher.lost_servers() == (0,)
        assert publisher.lost_servers() == (0,)
    assert not OurTransport(Way.TCP).is_lost()


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every communicator that a stock transport makes, without vLLM; ``store`` answers unless a test breaks it."""
    made: list[Any] = []

    def make(group: Any, timeout_s: float) -> Any:
        one = SimpleNamespace(group=SimpleNamespace(store=SimpleNamespace(check=lambda keys: False)))
        one.is_destroyed, one.destroy = False, lambda: setattr(one, "is_destroyed", True)
        made.append(one)
        return one

    utils: Any = types.ModuleType("vllm.distributed.utils")
    utils.StatelessProcessGroup = types.SimpleNamespace(create=lambda **_: object())
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    for package in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setattr(stock_transport, "GlooCommunicator", make)
    return made


def _raise(keys: Any) -> bool:
    raise RuntimeError("Connection reset by peer")


def test_a_push_over_a_group_that_lost_its_server_connects_anew(
    communicators: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_transport, "_CALL_TIMEOUT_S", 2.0)
    transport = StockTransport(CPU)
    never = threading.Event()
    with FakeRolloutServer(on_get=lambda call: Answer(body=b'{"world_size": 1}')) as server:
        for store_check, expected in (
            (None, 1),  # the first push
            (None, 1),  # its group still answers
            (_raise, 2),
            (lambda keys: never.wait(KILLED_BY_S), 3),  # silent: whatever holds the store would hold the push
        ):
            if store_check is not None:
                communicators[-1].group.store.check = store_check
            transport.open(delivery(server_at(server.url, 51216), 60.0))
            assert len(communicators) == expected
            dropped = [one.is_destroyed for one in communicators]
            assert dropped == [True] * (expected - 1) + [False]
        joins = [call.path for call in server.calls if call.path == wire.INIT_COMMUNICATOR]
        closes = [call.path for call in server.calls if call.path == wire.CLOSE_COMMUNICATOR]
        assert (len(joins), len(closes)) == (3, 3)
        transport.close(Deadline(5.0))
    never.set()


def test_a_group_that_never_forms_at_a_server_that_answers_no_more_ends_with_the_pushs_calls(
    communicators: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short push: finding out why, and closing, end with its calls."""
    never = threading.Event()
    group = sys.modules["vllm.distributed.utils"].StatelessProcessGroup
    monkeypatch.setattr(group, "create", lambda **_: never.wait(KILLED_BY_S))

    def joined_and_deaf(call: Call) -> Answer:
        asked_to_join = wire.INIT_COMMUNICATOR in [earlier.path for earlier in fake.calls[:-1]]
        body = b'{"message": "status: True"}'
        return Answer(body=body, after=never if asked_to_join else None)

    with FakeRolloutServer(on_reset=joined_and_deaf) as fake, dropping_port() as port:
        publisher = ThreadPublisher([server_at(fake.url, port)], lambda info: StockTransport(CPU))
        outcome = make_updates(LINEAR, publisher, timeout_s=4.0).run([0])
        never.set()
    assert outcome.failed == (0,)
    assert "the weight group did not form" in str(outcome.reports[0].error)


def test_a_group_port_behind_a_firewall_costs_a_push_the_joining_time_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = answering_as_ours(WeightExport(LINEAR).manifest())
    a_push_to_a_dropping_port(monkeypatch, server, partial(OurTransport, Way.TCP))
