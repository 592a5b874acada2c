"""The doctor of an objective that trains by rewards: learner and server agree on what was sampled, or it says so.

The real tiny model on the real server. The figures are compared with a forward pass of plain Hugging Face.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_run import Report
from live_server import LearnerRound, RunningServer, load_learner
from real_model import make_encoder, read_rows, rollout_of, sample_of
from sampled_packs import MEDIA_IDS, TOLERANCE, packed_gaps

from swift_stage2.checks import live_servers
from swift_stage2.checks.examination import Outcome, Verdict
from swift_stage2.checks.rollouts import TimedCall, check_gap
from swift_stage2.config import DecodingConfig

Configure = Callable[..., Path]
Doctor = Callable[..., Report]
ROW = "log-probabilities"
GRPO = {"stage2_ab__objective": "grpo", "rollout__num_generations": 4}
TEMPERATURE = 0.7
START_TIMEOUT_S = 240.0


def decoding(**changes: Any) -> dict[str, Any]:
    return {"rollout__decoding": {"temperature": TEMPERATURE, "max_new_tokens": 100, **changes}}


def figures(found: str) -> tuple[int, int, float, float]:
    """Tokens, rollouts, mean and 99th percentile."""
    match = re.match(r"(\d+) tokens of (\d+) rollouts .* differ by (\S+) nats .* by at most (\S+) \(", found)
    assert match, found
    tokens, rollouts, mean, high = match.groups()
    return int(tokens), int(rollouts), float(mean), float(high)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[TimedCall]:
    """The timed calls that the row is made of, as they come."""
    seen: list[TimedCall] = []

    def watched(calls: Sequence[TimedCall], *others: Any) -> Any:
        seen.extend(calls)
        return check_gap(calls, *others)

    monkeypatch.setattr(live_servers, "check_gap", watched)
    return seen


def by_hugging_face(calls: Sequence[TimedCall], temperature: float) -> torch.Tensor:
    """The same differences, of all rollouts in one pack, by plain Hugging Face's model of the checkpoint."""
    rollouts = [rollout for call in reversed(calls) for rollout in call.rollouts]
    trainable = [rollout for rollout in rollouts if MEDIA_IDS.isdisjoint(rollout.token_ids)]
    return packed_gaps(trainable, load_learner(), temperature)


@pytest.mark.slow
def test_a_server_with_the_learners_weights_agrees(
    server: RunningServer, configure: Configure, doctor: Doctor, answers: list[TimedCall]
) -> None:
    report = doctor(configure(server.base_url, **GRPO, **decoding()), "--live")
    row = report.row(ROW)
    assert (report.status, row["verdict"]) == (0, "ok"), report.text
    tokens, rollouts, mean, high = figures(row["found"])
    expected = by_hugging_face(answers, TEMPERATURE)
    assert (tokens, rollouts) == (len(expected), 9)
    assert mean < high < TOLERANCE
    assert float(expected.max()) < TOLERANCE
    assert "(tolerance in float32: 0.001 on average)" in row["found"]


def test_other_weights_are_a_huge_gap_and_said_to_be_so(
    server: RunningServer, configure: Configure, doctor: Doctor, answers: list[TimedCall]
) -> None:
    LearnerRound(server, load_learner(seed=3)).run()
    try:
        report = doctor(configure(server.base_url, **GRPO, **decoding()), "--live", "--no-sync")
    finally:
        LearnerRound(server, load_learner()).run()
    row = report.row(ROW)
    assert row["verdict"] == "warning"
    expected = by_hugging_face(answers, TEMPERATURE)
    tokens, _, mean, high = figures(row["found"])
    assert tokens == len(expected)
    assert mean == pytest.approx(float(expected.mean()), rel=0.05)
    assert high == pytest.approx(float(expected.quantile(0.99)), rel=0.05)
    assert row["fix"].startswith("likely, in this order: (1) other weights: ")
    assert "torch_dtype" not in row["fix"], "both dtypes are known, and equal"


# --- what is told of a difference, with a learner whose logits are made up -------------------------------


@pytest.fixture
def gap(rows_file: Path) -> Callable[..., Outcome[None]]:
    """``check_gap`` of one rollout, of which the learner gives every token half and the server ``apart`` nats less."""
    encoder, sample = make_encoder(), sample_of(read_rows(rows_file)[0])
    prompt = encoder.encode_prompt(sample)

    def check(
        apart: float = 0.0,
        *,
        num_tokens: int = 40,
        logits: Callable[..., torch.Tensor] = even_odds,
        dtypes: tuple[torch.dtype, str] = (torch.float32, "float32"),
        **decoding: Any,
    ) -> Outcome[None]:
        tokens = prompt.token_ids[:1] * num_tokens
        answer = rollout_of(sample, "", prompt.token_ids)
        log_probs = (math.log(0.5) - apart,) * num_tokens
        call = TimedCall(1, 1.0, (replace(answer, token_ids=tokens, log_probs=log_probs),))
        decoded = DecodingConfig(**{"temperature": TEMPERATURE, "max_new_tokens": 100, **decoding})
        return check_gap([call], encoder, decoded, logits, dtypes)

    return check


def even_odds(batch: Mapping[str, Any]) -> torch.Tensor:
    """Logits of half for every label, and half for one other token."""
    labels = batch["labels"][0]
    labels = labels[labels != -100]
    rows = torch.full((len(labels), int(labels.max()) + 2), -math.inf)
    rows[torch.arange(len(labels)), labels] = 0.0
    rows[:, -1] = 0.0
    return rows


@pytest.mark.parametrize(
    ("dtype", "apart", "verdict"),
    [
        (torch.float32, 9e-4, Verdict.OK),
        (torch.float32, 2e-3, Verdict.WARNING),
        (torch.bfloat16, 0.04, Verdict.OK),
        (torch.float16, 0.06, Verdict.WARNING),
        (torch.float32, math.nan, Verdict.WARNING),
    ],
)
def test_the_tolerance_is_the_dtypes(
    gap: Callable[..., Outcome[None]], dtype: torch.dtype, apart: float, verdict: Verdict
) -> None:
    assert gap(apart, dtypes=(dtype, str(dtype).removeprefix("torch."))).verdict is verdict


def test_a_dtype_that_differs_or_is_not_told_comes_first(gap: Callable[..., Outcome[None]]) -> None:
    for server, first in (
        ("float32", "other weights"),
        ("bfloat16", "another dtype (bfloat16)"),
        ("", "another dtype"),
    ):
        assert f"(1) {first}" in gap(0.1, dtypes=(torch.float32, server)).fix


def test_where_nothing_can_be_compared_the_row_says_why(gap: Callable[..., Outcome[None]]) -> None:
    def too_large(batch: Mapping[str, Any]) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for why, found in {
        "top_p, top_k, repetition_penalty": gap(top_p=0.9),
        "or a temperature below 0.1": gap(temperature=0.01),
        "a forward pass does not fit its device here": gap(logits=too_large),
        "the rollouts that can be trained have 31 tokens, fewer than 32": gap(num_tokens=31),
    }.items():
        assert found.verdict is Verdict.NOT_CHECKED
        assert why in found.found
