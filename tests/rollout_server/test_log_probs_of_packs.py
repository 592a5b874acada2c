"""The learner's log-probabilities of what a server sampled, read from a pack, are the server's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_server import LearnerRound, RunningServer, load_learner
from sampled_packs import TOLERANCE, packed_gaps, require_learners_log_probs, sample_answers


@pytest.mark.parametrize(("temperature", "of_greedy"), [(0.8, 0.8), (1.3, 1.3), (0.0, 1.0)])
def test_a_packs_log_probs_are_the_learners(
    server: RunningServer, rows: list[dict[str, Any]], temperature: float, of_greedy: float
) -> None:
    require_learners_log_probs(server, rows, temperature, of_greedy)


def test_so_they_are_not_under_other_weights_or_another_temperature(
    server: RunningServer, rows: list[dict[str, Any]]
) -> None:
    learner = load_learner()
    proof = LearnerRound(server, learner).run()
    rollouts = sample_answers(server, proof, rows[:3], temperature=0.8, max_new_tokens=20)
    assert float(packed_gaps(rollouts, learner, 1.0).max()) > 100 * TOLERANCE
    with torch.no_grad():
        learner.lm_head.weight[:] *= 1.01  # type: ignore[union-attr, operator, index]
    assert float(packed_gaps(rollouts, learner, 0.8).max()) > 10 * TOLERANCE
