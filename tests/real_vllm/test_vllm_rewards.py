"""Jobs that train rollouts by their rewards on vLLM: the server's log-probabilities are the learner's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import free_port
from our_server import start_ours, wait_until_healthy
from reward_job import require_equal_log_probs, run_rewards
from stock_server import ServerProcess
from torchrun_job import LearnerRun

from swift_stage2.demo.scenes import SceneKind, Split, write_dataset


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[ServerProcess]:
    server = start_ours(tmp_path, free_port())
    try:
        wait_until_healthy(server)
        yield server
    finally:
        server.end()


def _run(directory: Path, server: ServerProcess) -> LearnerRun:
    rows = write_dataset(directory / "shapes", SceneKind.SHAPES, 62, Split.TRAIN, 3)
    return run_rewards(directory / "grpo", rows, server, "grpo", mode="inline", learning_rate=0.0)


def test_stock_states_the_log_probabilities_of_the_learner(tmp_path: Path, stock: ServerProcess) -> None:
    require_equal_log_probs(_run(tmp_path, stock))


def test_so_does_our_server(tmp_path: Path, ours: ServerProcess) -> None:
    require_equal_log_probs(_run(tmp_path, ours))
