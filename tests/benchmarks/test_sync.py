"""The sync bench: real rounds through its courier, its bare copy and raw broadcast, and the words of its table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fake_rollout_server import LONGEST_WAIT_S, error
from fake_staging_server import FakeStagingServer
from free_port import free_port

from benchmarks import command, raw_broadcast
from benchmarks.raw_broadcast import RawSender, RawTransport
from benchmarks.servers import BenchServer, ServerKind
from benchmarks.sync import SYSTEMS, MeasuredSystem, SyncMeasurement, step_notes, step_ratios, sync_table
from benchmarks.sync_learner import MIB, SyncLearner, write_model
from swift_stage2.config import Transport
from swift_stage2.errors import ChildFailed
from swift_stage2.servers import protocol

SHARED = SYSTEMS[0]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> SyncLearner:
    model = tmp_path_factory.mktemp("sync") / "model"
    write_model(model, 1)
    learner = SyncLearner(model)
    learner.canary.agrees = lambda token_ids: True  # type: ignore[method-assign]
    return learner


@pytest.fixture
def sender(learner: SyncLearner) -> Iterator[RawSender]:
    port = free_port()
    argv = (RawTransport.OURS, str(port), *(str(bucket.numel()) for bucket in learner.buckets))
    peer = threading.Thread(target=raw_broadcast.main, args=(argv,))
    peer.start()
    with closing(RawSender(RawTransport.OURS, port)) as sender:
        yield sender
    peer.join(LONGEST_WAIT_S)
    assert not peer.is_alive()


@pytest.fixture
def server(learner: SyncLearner) -> Iterator[FakeStagingServer]:
    with FakeStagingServer(learner.export.manifest()) as server:
        yield server


def _measured(server: FakeStagingServer, learner: SyncLearner, sender: RawSender) -> MeasuredSystem:
    at: BenchServer = BenchServer(server.url, 51216, None)  # type: ignore[arg-type]
    return MeasuredSystem(SHARED, at, learner, sender)


def _weights(learner: SyncLearner) -> bytes:
    names = [spec.name for spec in learner.export.manifest()]
    return b"".join(tensor.numpy().tobytes() for _, tensor in learner.export.read(names))


def test_a_model_has_about_the_bytes_that_are_asked_for(learner: SyncLearner) -> None:
    assert learner.num_bytes == pytest.approx(MIB, rel=0.05)


def test_a_bare_copy_copies_every_byte_into_what_is_broadcast(learner: SyncLearner) -> None:
    for bucket in learner.buckets:
        bucket.fill_(1)
    assert learner.seconds_to_copy() > 0
    assert b"".join(bucket.numpy().tobytes() for bucket in learner.buckets) == _weights(learner)


@pytest.mark.slow
def test_rounds_are_staged_and_mapped_and_those_of_the_warm_up_are_not_counted(
    learner: SyncLearner, sender: RawSender, server: FakeStagingServer
) -> None:
    with (
        closing(_measured(server, learner, sender)) as first,
        closing(_measured(server, learner, sender)) as second,
    ):
        first.repeat(counted=False)
        first.repeat()
        second.repeat()
        ratios = step_ratios(second.seconds_per_step_beside_round, 1)
    assert [len(first.found.rounds), len(second.found.rounds), len(ratios)] == [1, 1, 1]
    assert [begun["staged"] for begun in server.begun] == [True] * 5
    assert [begun["version"] for begun in server.begun] == sorted({each["version"] for each in server.begun})
    # Both had the same memory; the token at its end names it.
    assert len(set(server.mapped)) == 1
    assert sorted(server.mapped[0][: learner.num_bytes]) == sorted(_weights(learner))
    found = first.found
    assert min(found.bare + found.raw + found.pause + ratios) > 0
    assert found.rounds[0].keys() >= {"begin", "connect", "pack", "push", "turn", "acknowledge", "prove"}
    assert found.rounds[0]["snapshot"] < found.pause[0] < found.rounds[0]["proven"]


def test_a_round_that_is_not_proven_is_no_measurement(
    learner: SyncLearner, sender: RawSender, server: FakeStagingServer
) -> None:
    server.hooks[protocol.FINISH_ROUND] = lambda call: error()
    with closing(_measured(server, learner, sender)) as measured, pytest.raises(ChildFailed, match="proven"):
        measured.repeat()


def test_pairs_of_steps_take_turns_and_blocks_are_as_long_as_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: order.append("alone"))

    def beside(step: Callable[[], object]) -> tuple[float, int]:
        order.append("beside")
        return 1.0, 3

    assert len(step_ratios(beside, 2)) == 2
    blocks = [name for index, name in enumerate(order) if index == 0 or name != order[index - 1]]
    assert blocks == ["beside", "alone", "beside", "alone"]
    assert order[:2] == ["beside", "alone"]
    assert order.count("beside") == 3
    assert order.count("alone") == 2 * 3 * 4


def _found(mib: float = 100, pause: float = 0.03, steps: tuple[float, ...] = ()) -> SyncMeasurement:
    found = SyncMeasurement(system="stock", num_bytes=int(mib * MIB))
    for extra in (0.0, 0.001, 0.002):
        found.bare.append(0.02)
        found.pause.append(pause + extra)
        found.raw.append(0.04)
        found.rounds.append({"push": 0.06, "canary": 0.5, "proven": 1.0 + extra})
    found.steps.extend(steps)
    return found


def test_the_table_has_a_row_per_system_and_size_and_judges_the_pause_of_many_bytes() -> None:
    table = sync_table([_found(1), _found(100, pause=0.02), _found(1024)])
    (small, held, missed) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    judged = "pause over bare copy, budget 1.5"
    assert small[judged] == "1.55 (1.52..1.58)"
    assert held[judged] == "1.05 (1.02..1.07) held"
    assert missed[judged] == "1.55 (1.52..1.58) missed"
    assert (held["MiB"], held["bare copy"], held["pause"], held["raw"]) == (
        "100",
        "0.0200",
        "0.0210",
        "0.0400",
    )
    assert (held["canary"], held["push"], held["turn"]) == ("0.5000", "0.0600", "0.0000")
    assert held["snapshot to proven"] == "1.001 (1.000..1.002)"
    assert _found().push_over_raw == pytest.approx([1.5] * 3)


def test_steps_beside_rounds_are_judged_only_where_everybody_has_a_core() -> None:
    measured = [_found(1), _found(1024, steps=(1.0, 1.02, 1.2)), _found(1024, steps=(1.5,))]
    (shared, _) = step_notes(measured, 2)
    assert "stock, on 2 cores: 1.020 (1.010..1.110); budget 1.03: not asked" in shared
    held, missed = step_notes(measured, 3)
    assert "budget 1.03: held." in held
    assert "budget 1.03: missed." in missed


def test_every_way_to_a_server_is_measured() -> None:
    assert [(system.kind, system.transport, len(system.plugins)) for system in SYSTEMS] == [
        (ServerKind.TRANSFORMERS, Transport.SHARED_MEMORY, 0),
        (ServerKind.TRANSFORMERS, Transport.TCP, 0),
        (ServerKind.VLLM, Transport.SHARED_MEMORY, 0),
        (ServerKind.STOCK, Transport.AUTO, 0),
        (ServerKind.STOCK, Transport.AUTO, 1),
        (ServerKind.VLLM_SERVE, Transport.AUTO, 0),
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_ways_to_a_real_server_are_proven_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["sync", "--mib", "1", "--repeats", "1", "--servers", "transformers", "--training"]
    assert command.main([*argv, "--output", str(out)]) == 0
    found = json.loads((out / "sync.json").read_text())
    assert [each["system"] for each in found] == ["transformers, shared memory", "transformers, tcp"]
    assert [len(each["rounds"]) for each in found] == [1, 1]
    assert [len(each["steps"]) for each in found] == [1, 1]
