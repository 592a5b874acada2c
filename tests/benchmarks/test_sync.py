"""The sync bench: real rounds through its courier, its bare copy, and the words of its table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fake_rollout_server import error
from fake_staging_server import FakeStagingServer

from benchmarks import command
from benchmarks.servers import BenchServer
from benchmarks.sync import SYSTEMS, MeasuredSystem, SyncMeasurement, sync_table
from benchmarks.sync_learner import MIB, SyncLearner, write_model
from swift_stage2 import wire
from swift_stage2.errors import ChildFailed

SHARED = SYSTEMS[0]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> SyncLearner:
    model = tmp_path_factory.mktemp("sync") / "model"
    write_model(model, 1)
    learner = SyncLearner(model)
    learner.canary.agrees = lambda token_ids: True  # type: ignore[method-assign]
    return learner


@pytest.fixture
def server(learner: SyncLearner) -> Iterator[FakeStagingServer]:
    with FakeStagingServer(learner.export.manifest()) as server:
        yield server


def _measured(server: FakeStagingServer, learner: SyncLearner) -> MeasuredSystem:
    at: BenchServer = BenchServer(server.url, 51216, None)  # type: ignore[arg-type]
    return MeasuredSystem(SHARED, at, learner)


def test_a_round_that_is_not_proven_is_no_measurement(
    learner: SyncLearner, server: FakeStagingServer
) -> None:
    server.hooks[wire.INSTALL] = lambda call: error()
    with closing(_measured(server, learner)) as measured, pytest.raises(ChildFailed, match="proven"):
        measured.repeat()


def _found(mib: float = 100, pause: float = 0.03) -> SyncMeasurement:
    found = SyncMeasurement(system="stock", num_bytes=int(mib * MIB))
    for extra in (0.0, 0.001, 0.002):
        found.bare.append(0.02)
        found.pause.append(pause + extra)
        found.rounds.append({"push": 0.06, "canary": 0.5, "proven": 1.0 + extra})
    return found


def test_the_table_has_a_row_per_system_and_size_and_judges_the_pause_of_many_bytes() -> None:
    table = sync_table([_found(1), _found(100, pause=0.02), _found(1024)])
    (small, held, missed) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    judged = "pause over bare copy, budget 1.5"
    assert small[judged] == "1.55 (1.52..1.58)"
    assert held[judged] == "1.05 (1.02..1.07) held"
    assert missed[judged] == "1.55 (1.52..1.58) missed"
    assert (held["MiB"], held["bare copy"], held["pause"]) == ("100", "0.0200", "0.0210")
    assert (held["canary"], held["push"], held["turn"]) == ("0.5000", "0.0600", "0.0000")
    assert held["snapshot to proven"] == "1.001 (1.000..1.002)"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_ways_to_a_real_server_are_proven_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["sync", "--mib", "1", "--repeats", "1", "--servers", "transformers"]
    assert command.main([*argv, "--output", str(out)]) == 0
    rows = (out / "sync.md").read_text().splitlines()[-2:]
    assert [row.split("|")[1].strip() for row in rows] == ["transformers, shared memory", "transformers, tcp"]
