"""The courier of the bench's jobs spoils the weights of a round, and is killed in the middle of one."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
import torch
from fake_staging_server import FakeStagingServer

from benchmarks.faults.commit import COURIER, VARIABLE, PushFault, Switch, Switches
from benchmarks.faults.courier import FaultyTransport, PushHistory, store_and_tear
from swift_stage2.collectives import SingleRank
from swift_stage2.config import Proof, RolloutConfig, ServerConfig
from swift_stage2.process.worker import start_worker
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights import courier_process
from swift_stage2.weights.disk_manifest import MANIFEST
from swift_stage2.weights.disk_rounds import RoundOnDisk
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import Canary
from swift_stage2.weights.sync_round import WeightSync
from swift_stage2.weights.transport import ServerEndpoint

_SESSION = cast(ServerSession, None)
_PROCESS_S = 90.0  # that is started in it


class Real:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def open(self, session: ServerSession, endpoint: ServerEndpoint, deadline: Deadline) -> None:
        self.sent.clear()

    def send(self, flat: torch.Tensor, deadline: Deadline) -> None:
        self.sent.append(flat.tolist())

    def close(self, deadline: Deadline) -> None: ...


@pytest.fixture
def switches(tmp_path: Path) -> Switches:
    return Switches(tmp_path)


def push(transport: FaultyTransport, *numbers: float) -> None:
    transport.open(_SESSION, ServerEndpoint("http://unused", 1), Deadline(1.0))
    for number in numbers:
        transport.send(torch.tensor([number]), Deadline(1.0))


def test_without_a_switch_everything_arrives(switches: Switches) -> None:
    real = Real()
    push(FaultyTransport(real, switches, PushHistory()), 1.0, 2.0)
    assert real.sent == [[1.0], [2.0]]


def test_zeros_arrive_instead(switches: Switches) -> None:
    real = Real()
    switches.set(Switch.PUSH, PushFault.ZEROS)
    push(FaultyTransport(real, switches, PushHistory()), 1.0, 2.0)
    assert real.sent == [[0.0], [0.0]]


def test_the_round_before_arrives_once_more_also_over_a_new_transport(switches: Switches) -> None:
    real, history = Real(), PushHistory()
    push(FaultyTransport(real, switches, history), 1.0, 2.0)
    switches.set(Switch.PUSH, PushFault.REPEAT)
    push(FaultyTransport(real, switches, history), 3.0, 4.0)
    assert real.sent == [[1.0], [2.0]]
    switches.clear(Switch.PUSH)
    push(FaultyTransport(real, switches, history), 5.0, 6.0)
    assert real.sent == [[5.0], [6.0]]


def test_buckets_are_kept_in_the_same_memory_round_after_round(switches: Switches) -> None:
    real, history = Real(), PushHistory()
    for number in range(6):
        push(FaultyTransport(real, switches, history), number, number + 0.5)
        if number == 1:
            kept = {bucket.data_ptr() for bucket in (*history.last, *history.present)}
    assert {bucket.data_ptr() for bucket in (*history.last, *history.present)} == kept
    assert [bucket.item() for bucket in history.last] == [4.0, 4.5]
    assert [bucket.item() for bucket in history.present] == [5.0, 5.5]


def test_rounds_of_other_buckets_are_kept_as_they_were_sent(switches: Switches) -> None:
    history = PushHistory()
    for sizes in ((1, 1, 1), (2, 1), (3, 1), (1, 2, 2)):
        history.begin_round()
        for number, size in enumerate(sizes):
            history.keep(number, torch.full((size,), float(size)))
        assert [bucket.tolist() for bucket in history.present][: len(sizes)] == [
            [float(s)] * s for s in sizes
        ]


def test_the_second_bucket_waits_until_it_is_let_go(switches: Switches) -> None:
    real = Real()
    switches.set(Switch.PUSH, PushFault.HOLD)
    transport = FaultyTransport(real, switches, PushHistory())
    pushing = threading.Thread(target=push, args=(transport, 1.0, 2.0, 3.0), daemon=True)
    pushing.start()
    assert switches.wait(Switch.PUSH_HELD, 20.0)
    assert real.sent == [[1.0]]
    switches.set(Switch.PUSH_RELEASED)
    pushing.join(20.0)
    assert real.sent == [[1.0], [2.0], [3.0]]


def test_half_of_a_manifest_is_lost_once_the_round_is_written(switches: Switches, tmp_path: Path) -> None:
    manifest = tmp_path / MANIFEST

    def store(round_: RoundOnDisk, deadline: Deadline) -> Path:
        manifest.write_text("0123456789")
        return tmp_path

    told = []
    for fault in ("", PushFault.TEAR):
        switches.set(Switch.PUSH, fault)
        assert store_and_tear(store, switches, cast(RoundOnDisk, None), Deadline(1.0)) == tmp_path
        told.append(manifest.read_text())
    assert told == ["0123456789", "01234"]


@pytest.mark.slow
@pytest.mark.timeout(3 * _PROCESS_S)
def test_the_courier_is_killed_in_its_next_errand_and_in_no_other(
    switches: Switches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(switches.directory))
    monkeypatch.setattr(
        courier_process, "start_worker", lambda module, environment: start_worker(COURIER, environment)
    )
    export = WeightExport(torch.nn.Linear(3, 2))
    with FakeStagingServer(export.manifest()) as server:
        rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url, group_port=51216),))
        sync = WeightSync(
            control=SingleRank(),
            export=export,
            canary=cast(Canary, None),
            courier=courier_process.process_courier(rollout, torch.device("cpu")),
            run_id="run",
            timeout_s=_PROCESS_S,
            bucket_mib=1,
            proof=Proof.CHECKSUM,
        )
        with closing(sync):
            assert sync.run(1, [0]).proven == (0,)
            switches.set(Switch.KILL_COURIER, "0")
            assert "was killed by SIGKILL" in str(sync.run(2, [0]).reports[0].error)
            assert switches.read(Switch.KILL_COURIER) == ""
            assert sync.run(3, [0]).proven == (0,)
