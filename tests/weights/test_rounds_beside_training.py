"""Rounds beside training: one snapshot for all servers; a slow, dead or hanging push; an export that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_rollout_server import FakeRolloutServer, outputs
from torch import nn

from swift_stage2.collectives import SingleRank
from swift_stage2.errors import ServerFault, WeightSyncError, WeightSyncHang
from swift_stage2.records import RoundOutcome
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights import sync_round as weight_sync
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.sync_round import ServerEndpoint, WeightSync

LIMIT_S = 20.0
NUM_BUCKETS = 4  # of one tensor of 1 MiB each
ONE_TOKEN = {
    "response": {
        "choices": [{"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1]}],
        "prompt_token_ids": [1],
    }
}


class AnyCanary:
    request: dict[str, Any] = {"messages": [{"role": "user", "content": "ping"}]}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012

    def answer(self) -> None: ...

    def agrees(self, token_ids: Any) -> bool:
        return True


class CountingExport(WeightExport):
    """The real export, which also notes what was read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.read_names: list[str] = []

    def read(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        self.read_names += names
        return super().read(names)


class Transport:
    """Keeps what it is sent; ``on_send`` is called with the number of the bucket first."""

    def __init__(self, on_send: Callable[[int], object]) -> None:
        self._on_send = on_send
        self.sent: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.closed = self.lost = False

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None: ...

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        self._on_send(len(self.sent))
        self.sent.append(flat.clone())  # the memory is the next bucket's
        self.addresses.append(flat.data_ptr())

    def is_lost(self) -> bool:
        return self.lost

    def close(self, deadline: Deadline) -> None:
        self.closed = True


class Round:
    """A learner with several stock servers, each with a transport that the test shapes."""

    def __init__(self, servers: Sequence[FakeRolloutServer], *on_send: Callable[[int], object]) -> None:
        self.module = nn.ParameterList([torch.full((512, 512), float(n)) for n in range(NUM_BUCKETS)])
        self.export = CountingExport(self.module)
        self.transports = [Transport(each) for each in on_send]
        self.servers = servers
        by_push = {
            f"push to {server.url}": transport
            for server, transport in zip(servers, self.transports, strict=True)
        }
        self.make_transport = lambda info: by_push[threading.current_thread().name]

    def sync(self, timeout_s: float = LIMIT_S) -> WeightSync:
        return WeightSync(
            [ServerEndpoint(server.url, 51216) for server in self.servers],
            control=SingleRank(),
            export=self.export,
            canary=AnyCanary(),
            make_transport=self.make_transport,
            run_id="run",
            timeout_s=timeout_s,
            bucket_mib=1,
        )

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
        assert not sync.has_ended
        let_go.set()
        outcome = sync.finish()
        assert not sync.has_ended
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


def test_a_slow_server_holds_up_no_other(servers: list[FakeRolloutServer]) -> None:
    """The slow one goes on only when the other has been asked its canary, which has everything by then."""
    other_is_through = threading.Event()
    servers[0].on_infer = lambda call: (other_is_through.set(), outputs([ONE_TOKEN]))[1]

    def wait_for_the_other(number: int) -> None:
        assert other_is_through.wait(LIMIT_S)

    assert Round(servers, at_once, wait_for_the_other).run().proven == (0, 1)


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
        assert len(transport.sent) == bad
        assert transport.closed
        assert protocol.PROCESS_WEIGHTS not in [call.path for call in server.calls]


def test_an_export_that_fails_is_told_when_the_round_finishes_and_no_server_is_asked(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round(servers, at_once, at_once)

    def fail(names: Sequence[str]) -> Any:
        raise RuntimeError("no memory to merge")

    monkeypatch.setattr(round_.export, "read", fail)
    sync = round_.sync()
    sync.begin(1, [0, 1])
    assert sync.has_ended
    with pytest.raises(WeightSyncError, match="copying the weights failed: RuntimeError: no memory to merge"):
        sync.finish()
    assert [server.calls for server in servers] == [[], []]
    assert not sync.has_ended


def test_a_push_that_hangs_is_named_and_the_other_got_everything(
    servers: list[FakeRolloutServer],
) -> None:
    let_go = threading.Event()
    round_ = Round(servers, at_once, lambda number: let_go.wait(LIMIT_S))
    sync = round_.sync(timeout_s=2.0)
    try:
        sync.begin(1, [0, 1])
        assert not sync.has_ended
        with pytest.raises(WeightSyncHang) as caught:
            sync.finish()
        assert servers[1].url in str(caught.value)
        assert servers[0].url not in str(caught.value)
        assert len(round_.transports[0].sent) == NUM_BUCKETS
        assert not round_.transports[1].closed
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
    (push,) = (thread for thread in threading.enumerate() if thread.name.startswith("push to"))
    assert stuck.wait(LIMIT_S)
    sync.close()
    assert not push.is_alive(), "the interpreter's end would meet it inside of torch"
    assert len(round_.transports[0].sent) == 1
    assert not sync.has_ended


def test_a_server_that_was_lost_since_its_proof_is_not_trusted(servers: list[FakeRolloutServer]) -> None:
    """A stock server that is back with its first weights looks like the one that has proven the round's."""
    round_ = Round(servers, at_once, at_once)
    sync = round_.sync()
    sync.begin(1, [0, 1])
    for thread in threading.enumerate():
        if thread.name.startswith("push to"):
            thread.join(LIMIT_S)
    round_.transports[1].lost = True
    outcome = sync.finish()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert outcome.reports[1].error == f"{servers[1].url} was lost after it had proven the weights"


def test_a_round_that_nobody_began_cannot_finish(servers: list[FakeRolloutServer]) -> None:
    with pytest.raises(RuntimeError, match="a round must begin"):
        Round(servers, at_once, at_once).sync().finish()


class SecondRank(SingleRank):
    """Hears at the end of the first round what rank 0 says."""

    rank = 1

    def broadcast(self, message: Any) -> Any:
        assert message is None
        return {"outcome": RoundOutcome("round", 1).to_json()}


def test_a_rank_that_waits_for_rank_0s_first_round_is_not_timed(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canary, snapshot and pushes have a limit each on rank 0; one for their sum would end a healthy job."""
    round_, begun = Round(servers, at_once, at_once), []
    sync = round_.sync()
    sync._control = SecondRank()
    monkeypatch.setattr(sync._watch, "begin", lambda *what: begun.append(what))
    assert sync.run(1, [0, 1]).version == 1
    assert begun == []
    assert round_.export.read_names == []
