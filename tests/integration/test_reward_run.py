"""Runs that train rollouts by their rewards: real ranks, server, template and replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from reward_job import STEPS, numbers_of, require_equal_log_probs, run_rewards
from torchrun_job import Server, assert_replays

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_server_s_probabilities_are_the_learner_s(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    run = run_rewards(tmp_path / "grpo", rows_file, server, "grpo", mode="inline", learning_rate=0.0)
    require_equal_log_probs(run)


def test_a_mixed_run_is_taken_again_to_the_last_bit(tmp_path: Path, rows_file: Path, server: Server) -> None:
    """Adapters, held by the model without them; targets in any order, with unlikelihood: all that a loss may read."""
    target = {"missed_order": "any", "weights": {"duplicate": 0.5}}
    adapter = {"tuner_type": "lora", "lora_dropout": 0, "learning_rate": 1e-2}
    run = run_rewards(tmp_path / "mixed", rows_file, server, "mixed", target=target, kl_weight=0.1, **adapter)
    numbers = numbers_of(run)
    assert numbers["groups_compared"] > 0
    assert numbers["policy_kl"] > 0
    assert 0 < numbers["policy_tokens"] < numbers["supervised_tokens_trained"], "targets are trained as well"
    assert_replays(run, STEPS, tmp_path / "replayed")
