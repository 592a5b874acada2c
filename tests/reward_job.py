"""A job of two real ranks that trains rollouts by their rewards, and its sums, for the tests of several folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from torchrun_job import Address, LearnerRun, run_learner, write_config

from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_logs

STEPS = 12
NATS_FLOAT32 = 1e-4  # two implementations of one model, in float32


def run_rewards(
    directory: Path,
    rows: Path,
    server: Address,
    objective: str,
    mode: str = "async",
    target: dict[str, Any] | None = None,
    kl_weight: float = 0.0,
    max_turns: int = 1,
    task: str = "detection",
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
        grpo={"kl_weight": kl_weight},
        target=target or {},
    )
    written = yaml.safe_load(config.read_text())
    written["stage2_ab"] |= {"objective": objective, "mode": mode, "task": task}
    written["stage2_ab"]["channel_b"]["packing"]["packing_length"] *= max_turns
    decoding = {"max_new_tokens": 100, "temperature": 1.0}
    written["rollout"] |= {"num_generations": 4, "decoding": decoding, "max_turns": max_turns}
    config.write_text(yaml.safe_dump(written))
    found = run_learner(config, directory, ranks=2)
    assert found.status == 0, found.output[-4000:]
    return found


def numbers_of(run: LearnerRun) -> dict[str, float]:
    """Both ranks' counters at the end, added up."""
    last = [run.audit(rank, "metrics")[-1]["numbers"] for rank in range(2)]
    return {name: sum(numbers[name] for numbers in last) for name in last[0] if name != "queue_limit"}


def require_equal_log_probs(run: LearnerRun, *, may_quarantine: bool = False) -> None:
    """Of a run without a learning rate: every version has the first weights, so whatever differs lies on the way."""
    numbers = numbers_of(run)
    assert numbers["groups_compared"] > 0
    assert numbers["policy_tokens"] > 100
    assert numbers["policy_log_prob_gap"] / numbers["policy_tokens"] < NATS_FLOAT32
    assert (numbers["policy_capped"], numbers["policy_clipped"]) == (0, 0)
    account = account_of(read_logs([run.directory]))
    assert account.is_balanced, account
    if not may_quarantine:
        assert run.audit(0, "quarantined") == []
