"""Tensor proof on the unmodified ``swift rollout`` with the plugin: what a push proves; each fault is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from live_server import free_port, train_a_little
from stock_server import VARIABLE, ServerProcess, start_stock
from test_stock_sync import Learner, _FlipsOneElement

from swift_stage2 import wire
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.records import RoundOutcome
from swift_stage2.servers.stock import WeightSums
from swift_stage2.stock_proof import PLUGIN

HERE = Path(__file__).parent
FIRST = "model.language_model.embed_tokens.weight"
K_PROJ = "model.language_model.layers.1.self_attn.k_proj.weight"  # one of three in vLLM's parameter


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A stock server with the plugin, whose loader goes wrong as the file ``fault`` beside its log says."""
    directory = tmp_path_factory.mktemp("summed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(directory / "fault"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        server = start_stock(directory, free_port(), plugins=[PLUGIN, HERE / "faulty_plugin.py"])
    try:
        server.wait_until_it_answers()
        yield server
    finally:
        server.end()


@pytest.fixture
def fault(summed: ServerProcess) -> Iterator[Path]:
    """Write into it what the worker's loader shall do; the next test finds a sound one."""
    file = summed.log.parent / "fault"
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def learner(summed: ServerProcess) -> Iterator[Learner]:
    built = Learner(summed)
    built.sync.updates.sync = SyncConfig(timeout_s=60.0)
    yield built
    built.sync.close()


def error_of(outcome: RoundOutcome) -> str:
    assert outcome.failed == (0,)
    return str(outcome.reports[0].error)


def sums_of(server: ServerProcess) -> WeightSums:
    reply = httpx.post(f"{server.base_url}{wire.WEIGHT_SUMS}", trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    return WeightSums.from_json(reply.json())


def test_pushes_are_proven_by_checksums_of_every_tensor(
    learner: Learner, summed: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="swift_stage2"):
        for _ in range(3):
            outcome = learner.push()
            assert outcome.proven == (0,), outcome.reports[0].error
            assert outcome.reports[0].proof in ("checksums+canary", "checksums")
            sums = sums_of(summed)
            assert sums.resident == sums.arrived
            assert sums.arrived.keys() == {spec.name for spec in learner.sync.snapshots.export.manifest()}
            assert (sums.left_out, sums.errors) == ((), ())
            train_a_little(learner.module)
    assert sum("can show every tensor's checksum" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", [FIRST, K_PROJ])
def test_a_tensor_that_the_loader_drops_is_named(learner: Learner, fault: Path, name: str) -> None:
    assert learner.push().proven == (0,)
    train_a_little(learner.module)
    fault.write_text(f"drop {name}")
    error = error_of(learner.push())
    assert name in error
    assert "was dropped" in error
    fault.unlink()
    assert learner.push().proven == (0,)


def test_one_element_that_flips_on_the_way_is_named(learner: Learner) -> None:
    learner.publisher.make_transport = lambda info: _FlipsOneElement(torch.device("cpu"))
    assert f"arrived checksum of {FIRST} differs" in error_of(learner.push())


def test_one_element_that_flips_after_the_load_is_named(learner: Learner, fault: Path) -> None:
    fault.write_text("flip")
    error = error_of(learner.push())
    assert "resident checksum of model." in error
    assert "(1 in all)" in error


def test_a_failure_of_the_worker_that_ms_swift_only_logs_is_told(learner: Learner, fault: Path) -> None:
    fault.write_text("raise")
    error = error_of(learner.push())
    assert "update_flattened_params: ValueError: a loader that fails" in error
    fault.unlink()
    assert learner.push().proven == (0,)
