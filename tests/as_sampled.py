"""A task that needs log-probabilities: it trains what was sampled, token by token. Loads neither torch nor ms-swift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swift_stage2.channel_b.task import Task
from swift_stage2.columns import LOG_PROBS
from swift_stage2.records import MatchQuality, Rollout, Target


class AsSampled(Task):
    """Trains what was sampled, token by token."""

    columns = (LOG_PROBS.name,)

    def read_truth(self, row: Mapping[str, Any]) -> None:
        return None

    def correct(self, rollout: Rollout, truth: Any, tokenise: Callable[..., Any]) -> Target:
        assert rollout.log_probs is not None
        return Target(
            text=rollout.text,
            token_ids=rollout.token_ids,
            weights=(1.0,) * len(rollout.token_ids),
            quality=MatchQuality(0, 0, 0, 0.0, 0, int(rollout.truncated)),
            columns={LOG_PROBS.name: rollout.log_probs},
        )

    def check_answer(self, text: str, truth: Any, normalise: Callable[[str], str] = str) -> None:
        return None
