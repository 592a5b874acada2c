"""One export for all servers: a slow, dead or hanging push, and an export that fails in the middle."""

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
        self.closed = False

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None: ...

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        self._on_send(len(self.sent))
        self.sent.append(flat.clone())  # the memory is the next bucket's
        self.addresses.append(flat.data_ptr())

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

    def run(self, timeout_s: float = LIMIT_S) -> Any:
        sync = WeightSync(
            [ServerEndpoint(server.url, 51216) for server in self.servers],
            control=SingleRank(),
            export=self.export,
            canary=AnyCanary(),
            make_transport=self.make_transport,
            run_id="run",
            timeout_s=timeout_s,
            bucket_mib=1,
        )
        return sync.run(1, list(range(len(self.servers))))


@pytest.fixture
def servers() -> Iterator[list[FakeRolloutServer]]:
    def one_token(call: Any) -> Any:
        return outputs([ONE_TOKEN])

    with FakeRolloutServer(on_infer=one_token) as first, FakeRolloutServer(on_infer=one_token) as second:
        yield [first, second]


def at_once(number: int) -> None: ...


def test_weights_are_read_once_for_all_servers_and_packed_once(servers: list[FakeRolloutServer]) -> None:
    round_ = Round(servers, at_once, at_once)
    outcome = round_.run()
    assert outcome.proven == (0, 1)
    assert round_.export.read_names == [str(n) for n in range(NUM_BUCKETS)]
    first, second = (transport.sent for transport in round_.transports)
    assert round_.transports[0].addresses == round_.transports[1].addresses
    assert [flat.view(torch.float32)[0].item() for flat in first] == [0.0, 1.0, 2.0, 3.0]
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))
    assert outcome.snapshot_seconds > 0
    for report in outcome.reports.values():
        assert report.num_bytes == NUM_BUCKETS << 20
        assert set(report.seconds) == {
            "begin", "connect", "wait", "pack", "push", "acknowledge", "prove",
        }  # fmt: skip


def test_a_server_that_dies_in_the_push_does_not_stop_the_other(servers: list[FakeRolloutServer]) -> None:
    def die_at_the_second(number: int) -> None:
        if number == 1:
            raise ServerFault("the server was lost while weights were sent")

    round_ = Round(servers, at_once, die_at_the_second)
    outcome = round_.run()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert "was lost while weights were sent" in outcome.reports[1].error
    assert [len(transport.sent) for transport in round_.transports] == [NUM_BUCKETS, 1]
    assert [transport.closed for transport in round_.transports] == [False, True]


def test_once_every_server_is_lost_nothing_more_is_read(servers: list[FakeRolloutServer]) -> None:
    def die(number: int) -> None:
        raise ServerFault("lost")

    round_ = Round(servers, die, die)
    assert round_.run().failed == (0, 1)
    assert len(round_.export.read_names) < NUM_BUCKETS


def test_a_slow_server_is_left_behind_and_the_other_is_proven(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one goes on only when the other has been asked its canary: it cannot have held it up till the end."""
    monkeypatch.setattr(weight_sync, "_SHARE_FOR_ONE", 0.01)
    other_is_through = threading.Event()
    servers[0].on_infer = lambda call: (other_is_through.set(), outputs([ONE_TOKEN]))[1]
    round_ = Round(servers, at_once, lambda number: other_is_through.wait(LIMIT_S))
    outcome = round_.run()
    assert other_is_through.is_set()
    assert (outcome.proven, outcome.failed) == ((0,), (1,))
    assert "kept faster servers waiting" in outcome.reports[1].error
    assert servers[1].url in outcome.reports[1].error
    assert len(round_.transports[1].sent) == 1


def test_one_slow_server_alone_is_waited_for(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer holds the third bucket before the first is sent; nobody else waits, so patience never ends."""
    monkeypatch.setattr(weight_sync, "_SHARE_FOR_ONE", 0.0)
    third_is_read = threading.Event()

    def wait_for_the_third(number: int) -> None:
        assert third_is_read.wait(LIMIT_S)

    round_ = Round(servers[:1], wait_for_the_third)
    read = round_.export.read

    def reading(names: Sequence[str]) -> Any:
        if names == ("2",):
            third_is_read.set()
        return read(names)

    monkeypatch.setattr(round_.export, "read", reading)
    assert round_.run().proven == (0,)


@pytest.mark.parametrize("bad", range(NUM_BUCKETS))
def test_an_export_that_fails_in_any_bucket_ends_every_push_and_names_the_tensor(
    servers: list[FakeRolloutServer], bad: int
) -> None:
    round_ = Round(servers, at_once, at_once)
    with torch.no_grad():
        round_.module[bad][3, 3] = float("nan")
    with pytest.raises(WeightSyncError, match=f"weights must be finite .* tensor={bad}"):
        round_.run()
    assert len(round_.export.read_names) == bad + 1
    for server, transport in zip(servers, round_.transports, strict=True):
        assert len(transport.sent) <= bad
        assert transport.closed
        assert protocol.PROCESS_WEIGHTS not in [call.path for call in server.calls]


def test_a_push_that_hangs_is_named_and_the_other_got_everything(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "_SHARE_FOR_ONE", 0.01)
    let_go = threading.Event()
    round_ = Round(servers, at_once, lambda number: let_go.wait(LIMIT_S))
    try:
        with pytest.raises(WeightSyncHang) as caught:
            round_.run(timeout_s=6.0)
        assert servers[1].url in str(caught.value)
        assert servers[0].url not in str(caught.value)
        assert len(round_.transports[0].sent) == NUM_BUCKETS
        assert not round_.transports[1].closed
    finally:
        let_go.set()


def test_an_export_that_takes_the_rounds_time_is_the_learners_fault(
    servers: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round(servers, at_once, at_once)
    read, never = round_.export.read, threading.Event()

    def slowly(names: Sequence[str]) -> Any:
        never.wait(1.0)  # longer than the 0.8 s that calls have
        return read(names)

    monkeypatch.setattr(round_.export, "read", slowly)
    with pytest.raises(WeightSyncError, match=r"rollout\.sync\.timeout_s=1, got .* raise it"):
        round_.run(timeout_s=1.0)
