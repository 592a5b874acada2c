"""Rounds beside training: one snapshot for all servers; a slow, dead or hanging push; an export that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from fake_rollout_server import Answer, Call, FakeRolloutServer, outputs
from fake_staging_server import FakeStagingServer
from torch import nn
from weight_updates import make_updates

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.records import RoundOutcome
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights import sync_round as weight_sync
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport
from swift_stage2.weights.waited_updates import WaitedUpdates

LIMIT_S = 60.0
NUM_BUCKETS = 4  # of one tensor of 1 MiB each
ONE_TOKEN = {
    "response": {
        "choices": [{"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1]}],
        "prompt_token_ids": [1],
    }
}


def weights() -> nn.ParameterList:
    return nn.ParameterList([torch.full((512, 512), float(n)) for n in range(NUM_BUCKETS)])


class CountingExport(WeightExport):
    """The real export, which also notes what was read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.read_names: list[str] = []

    def read(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        self.read_names += names
        return super().read(names)


class Transport(WeightTransport):
    """Keeps what it is sent; ``on_send`` is called with the number of the bucket first."""

    def __init__(self, on_send: Callable[[int], object]) -> None:
        self._on_send = on_send
        self.sent: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.closed = self.lost = False

    def open(self, *_: object) -> str:
        return "test"

    def carry(
        self, session: ServerSession, snapshot: SnapshotFile, deadline: Deadline, require_wanted: Any
    ) -> None:
        for bucket in snapshot.buckets:
            require_wanted()
            self._on_send(len(self.sent))
            self.sent.append(bucket.flat.clone())
            self.addresses.append(bucket.flat.data_ptr())

    def is_lost(self) -> bool:
        return self.lost

    def close(self, deadline: Deadline) -> None:
        self.closed = True


class Round:
    """A learner with several stock servers, each with a transport that the test shapes."""

    def __init__(self, servers: Sequence[FakeRolloutServer], *on_send: Callable[[int], object]) -> None:
        self.module = weights()
        self.export = CountingExport(self.module)
        self.transports = [Transport(each) for each in on_send]
        self.servers = servers
        self.by_push = {
            f"push to {server.url}": transport
            for server, transport in zip(servers, self.transports, strict=True)
        }
        self.make_transport = lambda info: self.by_push[threading.current_thread().name]

    def sync(self, timeout_s: float = LIMIT_S, span: EnterSpan = untraced, **options: Any) -> WaitedUpdates:
        endpoints = [ServerEndpoint(server.url, 51216) for server in self.servers]
        publisher = ThreadPublisher(endpoints, self.make_transport, span=span)
        return make_updates(self.export, publisher, timeout_s=timeout_s, **options)

    def run(self, timeout_s: float = LIMIT_S) -> RoundOutcome:
        return self.sync(timeout_s).run(1, list(range(len(self.servers))))

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.module:
                parameter.add_(100.0)


def firsts(transport: Transport) -> list[float]:
    """The first element of every bucket that was sent."""
    return [flat.view(torch.float32)[0].item() for flat in transport.sent]


@pytest.fixture
def servers() -> Iterator[list[FakeRolloutServer]]:
    def one_token(call: Any) -> Any:
        return outputs([ONE_TOKEN])

    with FakeRolloutServer(on_infer=one_token) as first, FakeRolloutServer(on_infer=one_token) as second:
        yield [first, second]


def at_once(number: int) -> None: ...


def test_weights_are_read_once_for_all_servers_and_sent_from_one_memory(
    servers: list[FakeRolloutServer],
) -> None:
    round_ = Round(servers, at_once, at_once)
    outcome = round_.run()
    assert outcome.proven == (0, 1)
    assert round_.export.read_names == [str(n) for n in range(NUM_BUCKETS)]
    first, second = round_.transports
    assert first.addresses == second.addresses
    assert firsts(first) == firsts(second) == [0.0, 1.0, 2.0, 3.0]
    assert outcome.snapshot_seconds > 0
    for report in outcome.reports.values():
        assert report.num_bytes == NUM_BUCKETS << 20
        assert set(report.seconds) == {"begin", "connect", "pack", "push", "acknowledge", "prove"}


def test_training_goes_on_while_a_push_waits_and_the_server_gets_the_weights_of_the_beginning(
    servers: list[FakeRolloutServer],
) -> None:
    let_go = threading.Event()
    round_ = Round(servers[:1], lambda number: let_go.wait(LIMIT_S))
    sync = round_.sync()
    for version in (1, 2):
        let_go.clear()
        round_.transports[0].sent.clear()
        sync.begin(version, [0])
        round_.train()
        assert not sync.has_news
        let_go.set()
        outcome = sync.hear()
        assert not sync.has_news
        assert (outcome.version, outcome.proven) == (version, (0,))
        assert firsts(round_.transports[0]) == [100.0 * (version - 1) + n for n in range(NUM_BUCKETS)]


def test_a_server_that_dies_in_the_push_does_not_stop_the_other(servers: list[FakeRolloutServer]) -> None:
    def die_at_the_second(number: int) -> None:
        if number == 1:
            raise ServerFault("the server was lost while weights were sent")

    round_ = Round(servers, at_once, die_at_the_second)
    outcome = round_.run()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert "was lost while weights were sent" in (outcome.reports[1].error or "")
    assert [len(transport.sent) for transport in round_.transports] == [NUM_BUCKETS, 1]
    assert [transport.closed for transport in round_.transports] == [False, True]


@pytest.mark.parametrize("bad", range(NUM_BUCKETS))
def test_weights_that_are_not_finite_end_every_push_and_are_named(
    servers: list[FakeRolloutServer], bad: int
) -> None:
    round_ = Round(servers, at_once, at_once)
    with torch.no_grad():
        round_.module[bad][3, 3] = float("nan")
    with pytest.raises(WeightSyncError, match=f"weights must be finite .* tensor={bad}"):
        round_.run()
    for server, transport in zip(servers, round_.transports, strict=True):
        assert transport.sent == [], "no server gets a part of them"
        assert wire.PROCESS_WEIGHTS not in [call.path for call in server.calls]


def test_an_export_that_fails_is_told_when_the_round_finishes_and_no_server_is_asked(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round(servers, at_once, at_once)

    def fail(names: Sequence[str]) -> Any:
        raise RuntimeError("no memory to merge")

    monkeypatch.setattr(round_.export, "read", fail)
    sync = round_.sync()
    sync.begin(1, [0, 1])
    assert sync.has_news
    with pytest.raises(WeightSyncError, match="copying the weights failed: RuntimeError: no memory to merge"):
        sync.hear()
    assert [server.calls for server in servers] == [[], []]
    assert not sync.has_news


def test_a_push_that_hangs_costs_its_server_the_round_and_the_next_one_gets_there(
    servers: list[FakeRolloutServer],
) -> None:
    let_go = threading.Event()
    round_ = Round(servers, at_once, lambda number: let_go.wait(LIMIT_S))
    sync = round_.sync(timeout_s=4.0)
    try:
        sync.begin(1, [0, 1])
        assert not sync.has_news
        outcome = sync.hear()
        assert (outcome.proven, outcome.failed, outcome.ended) == ((0,), (1,), True)
        assert outcome.reports[1].error == "the server did not take and prove the weights within 4 s"
        assert len(round_.transports[0].sent) == NUM_BUCKETS
        assert not round_.transports[1].closed
        round_.transports[1] = round_.by_push[f"push to {servers[1].url}"] = Transport(at_once)
        assert sync.run(2, [0, 1]).proven == (0, 1)
        assert len(round_.transports[1].sent) == NUM_BUCKETS
    finally:
        let_go.set()


def test_a_run_that_ends_gives_a_round_that_runs_some_time_and_then_ends_its_pushes(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "_LAST_ROUND_S", 0.0)
    monkeypatch.setattr(weight_sync, "_LEAST_WAIT_S", 0.1)
    stuck, closed = threading.Event(), threading.Event()
    round_ = Round(servers[:1], lambda number: (stuck.set(), closed.wait(LIMIT_S)))
    monkeypatch.setattr(round_.transports[0], "close", lambda deadline: closed.set())
    sync = round_.sync()
    sync.begin(1, [0])
    (push,) = (thread for thread in threading.enumerate() if thread.name == f"push to {servers[0].url}")
    assert stuck.wait(LIMIT_S)
    sync.close()
    assert not push.is_alive(), "the interpreter's end would meet it inside of torch"
    assert len(round_.transports[0].sent) == 1
    assert not sync.has_news


def test_a_server_that_was_lost_since_its_proof_is_not_trusted(servers: list[FakeRolloutServer]) -> None:
    """A stock server that is back with its first weights looks like the one that has proven the round's."""
    round_ = Round(servers, at_once, at_once)
    sync = round_.sync()
    sync.begin(1, [0, 1])
    for thread in threading.enumerate():
        if thread.name.startswith("push to"):
            thread.join(LIMIT_S)
    round_.transports[1].lost = True
    outcome = sync.hear()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert outcome.reports[1].error == "the server was lost after it had proven the weights"


# --- staged rounds -----------------------------------------------------------------------------------


@pytest.fixture
def staging() -> Iterator[list[FakeStagingServer]]:
    manifest = WeightExport(weights()).manifest()
    with FakeStagingServer(manifest) as first, FakeStagingServer(manifest) as second:
        yield [first, second]


def begin_staged(sync: WaitedUpdates, version: int = 1, *, held: bool = False) -> None:
    sync.begin(version, [0, 1], staged=True, held=held)


def wait_for_news(sync: WaitedUpdates) -> None:
    end, pause = time.monotonic() + LIMIT_S, threading.Event()
    while not sync.has_news:
        assert time.monotonic() < end
        pause.wait(0.005)


def hear_all(sync: WaitedUpdates) -> RoundOutcome:
    while not (outcome := sync.hear()).ended:
        pass
    return outcome


def paths_of(server: FakeRolloutServer) -> list[str]:
    return [call.path for call in server.calls]


def test_every_proof_of_a_staged_round_is_heard_when_it_comes(staging: list[FakeStagingServer]) -> None:
    let_go = threading.Event()
    sync = Round(staging, at_once, lambda number: let_go.wait(LIMIT_S)).sync()
    begin_staged(sync)
    wait_for_news(sync)
    first = sync.hear()
    assert (first.version, first.staged) == (1, True)
    assert (first.proven, first.news, first.ended) == ((0,), (0,), False)
    assert not sync.has_news
    let_go.set()
    wait_for_news(sync)
    last = sync.hear()
    assert (last.proven, last.news, last.ended) == ((0, 1), (1,), True)
    assert not sync.has_news
    assert [server.served for server in staging] == [1, 1]


def test_servers_install_a_staged_round_one_after_another(staging: list[FakeStagingServer]) -> None:
    """The first one to install is held until the other one waits for its turn."""
    asking, both_ask, installs = [], threading.Event(), []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        if name == "turn":
            asking.append(name)
            if len(asking) == 2:
                both_ask.set()
        yield

    def install(server: FakeStagingServer, call: Call) -> None:
        others = [other for other in staging if other is not server]
        installs.append([len(other.proofs) for other in others])
        assert both_ask.wait(LIMIT_S)

    for server in staging:
        server.hooks[wire.INSTALL] = partial(install, server)
    sync = Round(staging, at_once, at_once).sync(span=span)
    begin_staged(sync)
    hear_all(sync)
    assert installs == [[0], [1]], "the second installs what the first has proven"
    assert [server.served for server in staging] == [1, 1]


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_server_that_hangs_in_its_install_takes_no_other_one_with_it(
    staging: list[FakeStagingServer], hangs: int
) -> None:
    """The other one is held until that one has the turn."""
    let_go, has_turn = threading.Event(), threading.Event()

    def hang(call: Call) -> Answer:
        has_turn.set()
        return Answer(500, b"{}", after=let_go)

    staging[hangs].hooks[wire.INSTALL] = hang
    sends = [at_once, at_once]
    sends[1 - hangs] = lambda number: has_turn.wait(LIMIT_S)
    sync = Round(staging, *sends).sync(straggler_s=0.4)
    begin_staged(sync)
    try:
        outcome = hear_all(sync)
    finally:
        let_go.set()
    assert (outcome.proven, outcome.failed) == ((1 - hangs,), (hangs,))
    assert "0.4 s of the first proof" in str(outcome.reports[hangs].error)


def test_a_hold_ends_with_the_rounds_time_or_with_the_round(
    staging: list[FakeStagingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = Round(staging, at_once, at_once).sync()
    monkeypatch.setattr(weight_sync, "_SHARE_FOR_HOLD", 0.01)
    begin_staged(sync, held=True)
    assert hear_all(sync).proven == (0, 1)
    monkeypatch.setattr(weight_sync, "_SHARE_FOR_HOLD", 0.8)
    begin_staged(sync, version=2, held=True)
    sync._publisher.give_up("enough")
    assert sync._publisher.wait(0.4 * LIMIT_S), "nobody waits any more"
    assert hear_all(sync).failed == (0, 1)
    assert not any(paths_of(server).count(wire.INSTALL) > 1 for server in staging)
