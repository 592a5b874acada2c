"""A real run is recorded and taken again without a server: every loss and the weights at the end are the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchrun_job import LearnerRun, Server, run_learner, run_replay, write_config

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 20
# Dropout makes every draw of a random number that run and replay do not share show in the loss.
SWIFT = {"max_steps": NUM_STEPS, "tuner_type": "lora", "lora_dropout": 0.2, "learning_rate": 1e-2}


def _weights(run: LearnerRun, rank: int) -> dict[str, str]:
    (last,) = [record["weights"] for record in run.recorded(rank) if "weights" in record]
    return last


def _micro_steps(run: LearnerRun, rank: int) -> list[dict[str, Any]]:
    return [record for record in run.recorded(rank) if "batch" in record]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, server: Server) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / "recorded"
    config = write_config(directory, rows_file, server, b_ratio=0.5, swift=SWIFT, record=True)
    run = run_learner(config, directory, ranks=2)
    assert run.status == 0, run.output[-3000:]
    channels = [record["channel"] for record in run.audit(0, "step")]
    assert channels.count("B") >= 3, channels
    assert len([record for record in run.audit(0, "round") if record["committed"]]) >= 2
    return run


def test_every_loss_every_batch_and_the_last_weights_are_the_same_bits(
    recorded: LearnerRun, tmp_path: Path
) -> None:
    replay = run_replay(recorded.directory, tmp_path / "replay")
    assert replay.status == 0, replay.output[-3000:]
    assert f"equal: every loss of steps 0 to {NUM_STEPS - 1}" in replay.output
    for rank in (0, 1):
        assert _micro_steps(replay, rank) == _micro_steps(recorded, rank)
        assert _weights(replay, rank) == _weights(recorded, rank)
