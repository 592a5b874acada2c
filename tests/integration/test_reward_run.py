"""Runs that train rollouts by their rewards: real ranks, server, template and replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from torchrun_job import LearnerRun, Server, assert_replays, run_learner, write_config

from swift_stage2.telemetry.ledger import ledger_path
from swift_stage2.telemetry.ledger_account import account_of
from swift_stage2.telemetry.reading import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 12
NATS_FLOAT32 = 1e-4  # two implementations of one model, in float32


def _run(
    directory: Path,
    rows: Path,
    server: Server,
    objective: str,
    mode: str = "async",
    target: dict[str, Any] | None = None,
    kl_weight: float = 0.0,
    **swift: Any,
) -> LearnerRun:
    config = write_config(
        directory,
        rows,
        server,
        b_ratio=0.5,
        record=True,
        swift={
            "max_steps": STEPS,
            "gradient_accumulation_steps": 1,
            "lr_scheduler_type": "constant",
            **swift,
        },
        grpo={"straggler_s": 30.0, "kl_weight": kl_weight},
        target=target or {},
    )
    written = yaml.safe_load(config.read_text())
    written["stage2_ab"] |= {"objective": objective, "mode": mode}
    written["rollout"] |= {"num_generations": 4, "decoding": {"max_new_tokens": 100, "temperature": 1.0}}
    config.write_text(yaml.safe_dump(written))
    found = run_learner(config, directory, ranks=2)
    assert found.status == 0, found.output[-4000:]
    return found


def _numbers(run: LearnerRun) -> dict[str, float]:
    """Of both ranks, at the end."""
    last = [run.audit(rank, "metrics")[-1]["numbers"] for rank in range(2)]
    return {name: sum(numbers[name] for numbers in last) for name in last[0] if name != "queue_limit"}


@pytest.mark.long
def test_the_server_s_probabilities_are_the_learner_s(
    tmp_path: Path, rows_file: Path, server: Server
) -> None:
    """Without a learning rate every version has the first weights: whatever differs lies on the way."""
    run = _run(tmp_path / "grpo", rows_file, server, "grpo", mode="inline", learning_rate=0.0)
    numbers = _numbers(run)
    assert numbers["policy_tokens"] > 100
    assert numbers["policy_log_prob_gap"] / numbers["policy_tokens"] < NATS_FLOAT32
    assert (numbers["policy_capped"], numbers["policy_clipped"]) == (0, 0)
    account = account_of({rank: read_ledger(ledger_path(run.directory, rank)) for rank in range(2)})
    assert account.is_balanced, account
    assert run.audit(0, "quarantine") == []


def test_a_mixed_run_is_taken_again_to_the_last_bit(tmp_path: Path, rows_file: Path, server: Server) -> None:
    """Adapters, held by the model without them; targets in any order, with unlikelihood: all that a loss may read."""
    target = {"missed_order": "any", "weights": {"duplicate": 0.5}}
    adapter = {"tuner_type": "lora", "lora_dropout": 0, "learning_rate": 1e-2}
    run = _run(tmp_path / "mixed", rows_file, server, "mixed", target=target, kl_weight=0.1, **adapter)
    numbers = _numbers(run)
    assert numbers["groups_compared"] > 0
    assert numbers["policy_kl"] > 0
    assert 0 < numbers["policy_tokens"] < numbers["supervised_tokens_trained"], "targets are trained as well"
    assert_replays(run, STEPS, tmp_path / "replayed")
