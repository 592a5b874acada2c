"""Pushes beside training: one snapshot for all servers; a slow, dead or hanging push; an export that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from fake_rollout_server import Answer, Call, FakeRolloutServer
from fake_staging_server import FakeStagingServer
from torch import nn
from weight_updates import make_updates, server_at

from swift_stage2 import wire
from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.records import RoundOutcome
from swift_stage2.servers.session import Deadline
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights import updates as updates_module
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.publisher import ThreadPublisher
from swift_stage2.weights.transport import Delivery, OurTransport, WeightTransport
from swift_stage2.weights.waited_updates import WaitedUpdates

Servers = list[FakeRolloutServer]
LIMIT_S = 60.0
NUM_BUCKETS = 4  # of one tensor of 1 MiB each


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
        self.on_send = on_send
        self.sent: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.closed = self.lost = False

    def open(self, *_: object) -> str:
        return "test"

    def carry(self, push: Delivery) -> None:
        for bucket in push.snapshot.buckets:
            push.require_wanted()
            self.on_send(len(self.sent))
            self.sent.append(bucket.flat.clone())
            self.addresses.append(bucket.flat.data_ptr())

    def is_lost(self) -> bool:
        return self.lost

    def close(self, deadline: Deadline) -> None:
        self.closed = True


class Mapped(OurTransport):
    """The real one; ``on_send`` is called before the server has all."""

    def __init__(self, on_send: Callable[[int], object]) -> None:
        super().__init__()
        self.on_send = on_send

    def carry(self, *_: Any) -> None:
        self.on_send(0)


class Scene:
    """A learner with several stock servers, each with a transport that the test shapes."""

    def __init__(
        self, servers: Sequence[FakeRolloutServer], *on_send: Callable[[int], object], kind: Any = Transport
    ) -> None:
        self.module = weights()
        self.export = CountingExport(self.module)
        self.transports = [kind(each) for each in on_send]
        self.servers = servers
        self.by_push = {
            f"push to {server.url}": transport
            for server, transport in zip(servers, self.transports, strict=True)
        }
        self.make_transport = lambda info: self.by_push[threading.current_thread().name]

    def updates(
        self, timeout_s: float = LIMIT_S, *, span: EnterSpan = untraced, stages: bool = False
    ) -> WaitedUpdates:
        endpoints = [server_at(server.url, 51216) for server in self.servers]
        publisher = ThreadPublisher(endpoints, self.make_transport, span=span)
        updates = make_updates(self.export, publisher, len(endpoints), timeout_s=timeout_s)
        for life in updates.lives:
            life.stages = stages
        return updates

    def run(self) -> RoundOutcome:
        return self.updates().run(range(len(self.servers)))

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.module:
                parameter.add_(100.0)


def firsts(transport: Transport) -> list[float]:
    """The first element of every bucket that was sent."""
    return [flat.view(torch.float32)[0].item() for flat in transport.sent]


@pytest.fixture
def servers() -> Iterator[list[FakeRolloutServer]]:
    with FakeRolloutServer() as first, FakeRolloutServer() as second:
        yield [first, second]


def at_once(number: int) -> None: ...


def test_weights_are_read_once_for_all_servers_and_sent_from_one_memory(servers: Servers) -> None:
    scene = Scene(servers, at_once, at_once)
    outcome = scene.run()
    assert outcome.proven == (0, 1)
    assert scene.export.read_names == [str(n) for n in range(NUM_BUCKETS)]
    first, second = scene.transports
    assert first.addresses == second.addresses
    assert firsts(first) == firsts(second) == [0.0, 1.0, 2.0, 3.0]
    assert outcome.snapshot_seconds > 0
    for report in outcome.reports.values():
        assert report.num_bytes == NUM_BUCKETS << 20
        assert set(report.seconds) == {"begin", "connect", "pack", "push", "acknowledge", "prove"}


def test_training_goes_on_while_a_push_waits_and_the_server_gets_the_weights_of_the_beginning(
    servers: Servers,
) -> None:
    let_go = threading.Event()
    scene = Scene(servers[:1], lambda number: let_go.wait(LIMIT_S))
    updates = scene.updates()
    for version in (1, 2):
        let_go.clear()
        scene.transports[0].sent.clear()
        updates.begin([0])
        scene.train()
        assert updates.look() is None
        let_go.set()
        outcome = updates.wait()
        assert (outcome.version, outcome.proven) == (version, (0,))
        assert firsts(scene.transports[0]) == [100.0 * (version - 1) + n for n in range(NUM_BUCKETS)]


def test_a_server_that_dies_in_the_push_does_not_stop_the_other(servers: Servers) -> None:
    def die_at_the_second(number: int) -> None:
        if number == 1:
            raise ServerFault("the server was lost while weights were sent")

    scene = Scene(servers, at_once, die_at_the_second)
    outcome = scene.run()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert "was lost while weights were sent" in (outcome.reports[1].error or "")
    assert [len(transport.sent) for transport in scene.transports] == [NUM_BUCKETS, 1]
    assert [transport.closed for transport in scene.transports] == [False, True]


@pytest.mark.parametrize("bad", range(NUM_BUCKETS))
def test_weights_that_are_not_finite_end_every_push_and_are_named(servers: Servers, bad: int) -> None:
    scene = Scene(servers, at_once, at_once)
    with torch.no_grad():
        scene.module[bad][3, 3] = float("nan")
    with pytest.raises(WeightSyncError, match=f"weights must be finite .* tensor={bad}"):
        scene.run()
    for server, transport in zip(servers, scene.transports, strict=True):
        assert transport.sent == [], "no server gets a part of them"
        assert wire.PROCESS_WEIGHTS not in [call.path for call in server.calls]


def test_an_export_that_fails_is_told_and_no_server_is_asked(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(servers, at_once, at_once)

    def fail(names: Sequence[str]) -> Any:
        raise RuntimeError("no memory to merge")

    monkeypatch.setattr(scene.export, "read", fail)
    with pytest.raises(WeightSyncError, match="copying the weights failed: RuntimeError: no memory to merge"):
        scene.run()
    assert [server.calls for server in servers] == [[], []]


def test_a_push_that_hangs_costs_its_server_the_version_and_the_next_one_gets_there(servers: Servers) -> None:
    let_go = threading.Event()
    scene = Scene(servers, at_once, lambda number: let_go.wait(LIMIT_S))
    updates = scene.updates(timeout_s=4.0)
    try:
        outcome = updates.run([0, 1])
        assert (outcome.proven, outcome.failed) == ((0,), (1,))
        assert outcome.reports[1].error == "the server did not take and prove the weights within 4 s"
        assert len(scene.transports[0].sent) == NUM_BUCKETS
        assert not scene.transports[1].closed
        scene.transports[1] = scene.by_push[f"push to {servers[1].url}"] = Transport(at_once)
        assert updates.run([0, 1]).proven == (0, 1)
        assert len(scene.transports[1].sent) == NUM_BUCKETS
    finally:
        let_go.set()


def test_a_run_that_ends_gives_a_push_that_runs_some_time_and_then_ends_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates_module, "_LAST_PUSH_S", 0.1)
    stuck, closed = threading.Event(), threading.Event()
    scene = Scene(servers[:1], lambda number: (stuck.set(), closed.wait(LIMIT_S)))
    monkeypatch.setattr(scene.transports[0], "close", lambda deadline: closed.set())
    updates = scene.updates()
    updates.begin([0])
    updates.look()
    updates.look()
    (push,) = (thread for thread in threading.enumerate() if thread.name == f"push to {servers[0].url}")
    assert stuck.wait(LIMIT_S)
    updates.close()
    assert not push.is_alive(), "the interpreter's end would meet it inside of torch"
    assert len(scene.transports[0].sent) == 1


# --- servers that answer meanwhile ---------------------------------------------------------------


@pytest.fixture
def staging() -> Iterator[list[FakeStagingServer]]:
    manifest = WeightExport(weights()).manifest()
    with FakeStagingServer(manifest) as first, FakeStagingServer(manifest) as second:
        yield [first, second]


def test_servers_that_answer_meanwhile_install_one_after_another(staging: list[FakeStagingServer]) -> None:
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
        installs.append([len(other.proofs) for other in staging if other is not server])
        assert both_ask.wait(LIMIT_S)

    updates = Scene(staging, at_once, at_once, kind=Mapped).updates(span=span, stages=True)
    assert updates.run([0, 1]).proven == (0, 1)
    assert asking == [], "nobody asks them yet"
    for server in staging:
        server.hooks[wire.INSTALL] = partial(install, server)
    outcome = updates.run([0, 1])
    assert (outcome.proven, outcome.staged) == ((0, 1), True)
    assert installs == [[1], [2]], "the second installs what the first has proven"
    assert [server.served for server in staging] == [2, 2]


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_server_that_hangs_in_its_install_takes_no_other_one_with_it(
    staging: list[FakeStagingServer], hangs: int
) -> None:
    """The other one is held until that one has the turn."""
    let_go, has_turn = threading.Event(), threading.Event()

    def hang(call: Call) -> Answer:
        has_turn.set()
        return Answer(500, b"{}", after=let_go)

    scene = Scene(staging, at_once, at_once, kind=Mapped)
    updates = scene.updates(stages=True)
    updates.run([0, 1])
    updates.updates.straggler_s = 0.8
    staging[hangs].hooks[wire.INSTALL] = hang
    scene.transports[1 - hangs].on_send = lambda number: has_turn.wait(LIMIT_S)
    try:
        updates.begin([0, 1])
        while updates.lives[1 - hangs].version < 2:
            assert updates.look() is None
            time.sleep(0.005)
        updates.updates.hurry("after other weights were due")
        outcome = updates.wait()
    finally:
        let_go.set()
    assert (outcome.proven, outcome.failed) == ((1 - hangs,), (hangs,))
    assert "0.8 s after other weights were due" in str(outcome.reports[hangs].error)
