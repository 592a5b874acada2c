"""Tensor proof on the unmodified ``swift rollout`` with the plugin: what a push proves; each fault is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from commands import run_python
from live_server import free_port, train_a_little
from stock_server import ServerProcess, start_stock
from test_stock_sync import Learner, _FlipsOneElement

from benchmarks.clocks import DIRECTORY_VARIABLE
from benchmarks.learner_job import Arm, grpo_arguments
from swift_stage2 import wire
from swift_stage2.config import Proof
from swift_stage2.config.rollout import SyncConfig
from swift_stage2.config.swift_arguments import as_argv
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT
from swift_stage2.demo.grounding_dataset import write_scenes
from swift_stage2.demo.scenes import SceneKind
from swift_stage2.records import RoundOutcome
from swift_stage2.servers.stock import WeightSums
from swift_stage2.stock_proof import PLUGIN

VARIABLE = "STAGE2_TEST_FAULT_FILE"
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
    built.sync.updates._sync = SyncConfig(timeout_s=60.0)
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
            assert not outcome.reports[0].stamps
            sums = sums_of(summed)
            assert sums.resident == sums.arrived
            assert sums.arrived.keys() == {spec.name for spec in learner.sync.snapshots.export.manifest()}
            assert (sums.left_out, sums.errors, sums.adapter) == ((), (), {})
            train_a_little(learner.module)
    assert sum("can show every tensor's checksum" in record.message for record in caplog.records) == 1


def test_a_server_without_the_plugin_has_the_canary_alone(stock: ServerProcess) -> None:
    learner = Learner(stock)
    assert learner.push().reports[0].proof == "canary"
    learner.sync.updates._sync = SyncConfig(timeout_s=60.0, proof=Proof.CHECKSUM)
    assert "no checksums" in error_of(learner.push())
    learner.sync.close()


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


_GRPO_S = 800.0


def run_grpo(
    directory: Path,
    server: ServerProcess,
    *,
    mode: str = "raise",
    tuner_type: str = "full",
    flat: bool = True,
) -> tuple[int, str]:
    """Two steps of ms-swift's own GRPO with the plugin, and no learner of ours: exit status and what it printed."""
    rows = write_scenes(directory, SceneKind.SHAPES, num_train=32, num_held_out=1, seed=0).train
    ports = (server.port, server.group_port)
    arm = Arm(name="grpo", directory=directory / "grpo", rows=rows, num_steps=2, ports=ports)
    arguments = grpo_arguments(arm, asynchronous=False)
    arguments["external_plugins"] = [*arguments["external_plugins"], str(PLUGIN)]
    arguments |= {"tuner_type": tuner_type, "enable_flattened_weight_sync": flat}
    program = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "-m",
        "benchmarks.swift_program",
    )
    place = {DIRECTORY_VARIABLE: str(arm.directory), "SWIFT_STAGE2_WEIGHT_PROOF": mode}
    finished = run_python(
        "-m",
        *program,
        "rlhf",
        *as_argv(arguments),
        timeout=_GRPO_S,
        variables=CHILD_ENVIRONMENT | place,
    )
    return finished.returncode, finished.stdout + finished.stderr


def test_ms_swifts_own_grpo_trains_when_every_push_is_held(summed: ServerProcess, tmp_path: Path) -> None:
    status, output = run_grpo(tmp_path, summed)
    assert status == 0, output[-3000:]
    assert "92 tensors arrived and are resident as they were sent" in output
    assert sums_of(summed).problems(sums_of(summed).arrived) == []


def test_ms_swifts_own_grpo_ends_with_the_name_of_a_tensor_that_was_dropped(
    summed: ServerProcess, fault: Path, tmp_path: Path
) -> None:
    name = K_PROJ.replace("language_model.", "")  # ms-swift pushes by the checkpoint's names
    fault.write_text(f"drop {name}")
    status, output = run_grpo(tmp_path, summed, flat=False)
    assert status != 0
    assert f"does not hold the weights it was sent: {name} (1 in all) arrived" in output, output[-3000:]
