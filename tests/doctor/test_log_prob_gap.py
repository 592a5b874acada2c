"""The doctor of an objective that trains by rewards: learner and server agree on what was sampled, or it says so.

The real tiny model on the real server. The figures are compared with a forward pass of plain Hugging Face.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_run import Report
from live_server import MODEL, LearnerRound, RunningServer, load_generator, load_learner, serve
from peft import LoraConfig, get_peft_model
from real_model import make_encoder, read_rows, rollout_of, sample_of
from sampled_packs import MEDIA_IDS, TOLERANCE, packed_gaps

from swift_stage2.config import load_config
from swift_stage2.doctor import log_prob_gap
from swift_stage2.doctor.examination import Outcome, Verdict
from swift_stage2.doctor.log_prob_gap import LearnerSide, ServerSide, check_gap, dropout_of
from swift_stage2.doctor.rollouts import TimedCall
from swift_stage2.rollout_server.engine import Sampling
from swift_stage2.rollout_server.swift_generator import SwiftGenerator
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine

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

    monkeypatch.setattr(log_prob_gap, "check_gap", watched)
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
    assert "so far apart are other weights: the server does not hold the checkpoint's" in row["found"]
    assert row["fix"].startswith(
        "likely, in this order: (1) other weights: restart the server with the learner's"
    )
    assert "torch_dtype" not in row["fix"], "both dtypes are known, and equal"


@pytest.mark.slow
def test_a_server_that_leaves_the_temperature_out_is_found(
    server: RunningServer, configure: Configure, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    warpers = SwiftGenerator._warpers

    def without_temperature(self: SwiftGenerator, sampling: Sampling) -> Any:
        return warpers(self, replace(sampling, temperature=1.0) if sampling.temperature else sampling)

    monkeypatch.setattr(SwiftGenerator, "_warpers", without_temperature)
    report = doctor(configure(server.base_url, **GRPO, **decoding()), "--live")
    row = report.row(ROW)
    assert row["verdict"] == "warning"
    assert figures(row["found"])[2] > 1e-3
    assert "the server leaves the temperature out" in row["found"]
    assert row["fix"].endswith("or write rollout.decoding.temperature: 1.0")


@pytest.fixture(scope="module")
def bfloat16_engine() -> Iterator[TransformersRolloutEngine]:
    engine = TransformersRolloutEngine(
        lambda: load_generator(torch.bfloat16), model=str(MODEL), max_batch_size=16
    )
    assert engine.wait_loaded(START_TIMEOUT_S)
    yield engine
    engine.close(timeout_s=10.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "verdict", "told"), [("bfloat16", "ok", "0.05"), ("float32", "warning", "0.001")]
)
def test_the_learners_dtype_says_what_is_tolerated(
    learner: str,
    verdict: str,
    told: str,
    bfloat16_engine: TransformersRolloutEngine,
    configure: Configure,
    doctor: Doctor,
) -> None:
    with serve(bfloat16_engine) as server:
        config = configure(server.base_url, **GRPO, **decoding(temperature=1.0), swift__torch_dtype=learner)
        row = doctor(config, "--live", "--no-sync").row(ROW)
    assert row["verdict"] == verdict
    assert f"(tolerance in {learner}: {told} on average)" in row["found"]
    assert 1e-5 < figures(row["found"])[2] < 0.05
    assert "so far apart" not in row["found"]
    if verdict == "warning":
        assert row["fix"].startswith(
            "likely, in this order: (1) another dtype (bfloat16 there): start it with --torch_dtype float32 "
            "(launch.servers[0].args); (2) other weights: "
        )


@pytest.mark.slow
def test_dropout_is_told_where_both_sides_agree_without_it(
    server: RunningServer, configure: Configure, doctor: Doctor, tmp_path: Path
) -> None:
    """A new adapter changes nothing yet, so that no comparison shows the dropout of one that is trained further."""
    with_adapter(0.1).save_pretrained(tmp_path / "adapter")
    changes = {
        "swift__tuner_type": "lora",
        "swift__lora_dropout": 0,
        "swift__adapters": [str(tmp_path / "adapter")],
    }
    report = doctor(configure(server.base_url, **GRPO, **decoding(), **changes), "--live", "--no-sync")
    row = report.row(ROW)
    assert row["verdict"] == "warning"
    assert "the learner trains with a dropout of 0.1, and servers have none" in row["found"]
    assert row["fix"].startswith("write swift.lora_dropout: 0, also in the adapter_config.json")


# --- what is told of a difference, with a learner whose logits are made up -------------------------------


@pytest.fixture
def gap(rows_file: Path, configure: Configure) -> Callable[..., Outcome[None]]:
    """``check_gap`` of one rollout, of which the learner gives every token half and the server ``apart`` nats less."""
    encoder, sample = make_encoder(), sample_of(read_rows(rows_file)[0])
    prompt = encoder.encode_prompt(sample)

    def check(
        changes: Mapping[str, Any] | None = None,
        *,
        apart: float = 0.0,
        num_tokens: int = 40,
        logits: Callable[..., torch.Tensor] = even_odds,
        **facts: Any,
    ) -> Outcome[None]:
        tokens = prompt.token_ids[:1] * num_tokens
        answer = rollout_of(sample, "", prompt.token_ids)
        log_probs = (math.log(0.5) - apart,) * num_tokens
        call = TimedCall(1, 1.0, (replace(answer, token_ids=tokens, log_probs=log_probs),))
        learner = {"dtype": torch.float32, "dropout": 0.0, "logits": logits}
        server = {"key": "launch.servers[0].args", "dtype": "float32", "proof": "checksums"}
        return check_gap(
            [call],
            encoder,
            load_config(configure("http://127.0.0.1:1", **(changes or {**GRPO, **decoding()}))),
            LearnerSide(**{name: facts.get(f"learner_{name}", value) for name, value in learner.items()}),
            ServerSide(**{name: facts.get(f"server_{name}", value) for name, value in server.items()}),
        )

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
        (torch.bfloat16, 0.06, Verdict.WARNING),
        (torch.float16, 0.04, Verdict.OK),
        (torch.float16, 0.06, Verdict.WARNING),
        (torch.float32, math.nan, Verdict.WARNING),
    ],
)
def test_the_tolerance_is_the_dtypes(
    gap: Callable[..., Outcome[None]], dtype: torch.dtype, apart: float, verdict: Verdict
) -> None:
    assert gap(apart=apart, learner_dtype=dtype).verdict is verdict


@pytest.mark.parametrize(
    ("facts", "order"),
    [
        ({}, ["other images", "another attention"]),
        ({"server_dtype": "bfloat16"}, ["another dtype (bfloat16 there)", "other images"]),
        ({"server_proof": ""}, ["other weights: restart the server", "other images"]),
        ({"server_proof": "", "apart": 2.0}, ["other weights: restart the server", "other images"]),
        (
            {"server_proof": "", "apart": 2.0, "server_dtype": "bfloat16"},
            ["other weights: restart the server", "another dtype (bfloat16 there)"],
        ),
        ({"server_proof": "canary"}, ["other weights: have checksums prove them", "other images"]),
        ({"server_dtype": None}, ["another dtype, which it does not tell", "other images"]),
    ],
)
def test_what_is_known_to_differ_comes_first(
    gap: Callable[..., Outcome[None]], facts: dict[str, Any], order: list[str]
) -> None:
    found = gap(**{"apart": 0.1, **facts})
    causes = re.split(r"\(\d\) ", found.fix)[1:]
    assert [cause[: len(told)] for cause, told in zip(causes, order, strict=False)] == order
    assert ("so far apart are other weights" in found.found) == (facts.get("apart") == 2.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (decoding(top_p=0.9), "rollout.decoding.top_p: 0.9 changes the distribution; write 1"),
        (decoding(temperature=0.01), "enlarges the rounding of logits by 100; write 0, or 0.1 or more"),
    ],
)
def test_another_distribution_than_the_learners_cannot_be_compared(
    gap: Callable[..., Outcome[None]], changes: dict[str, Any], why: str
) -> None:
    found = gap({"telemetry__record": True, "telemetry__log_probs": True, **changes})
    assert found.verdict is Verdict.NOT_CHECKED
    assert found.found.startswith("cannot tell: ")
    assert why in found.found


def test_where_nothing_can_be_seen_the_row_says_why(gap: Callable[..., Outcome[None]]) -> None:
    def too_large(batch: Mapping[str, Any]) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def sure(batch: Mapping[str, Any]) -> torch.Tensor:
        return even_odds(batch)[:, :-1]

    unseen = {
        "the model is loaded, but a forward pass does not fit its device here": gap(logits=too_large),
        "the rollouts that can be trained have 31 tokens, fewer than 32": gap(num_tokens=31),
        "the model is sure of every token": gap(logits=sure, apart=math.log(0.5)),
    }
    for why, found in unseen.items():
        assert found.verdict is Verdict.NOT_CHECKED
        assert found.found.startswith(f"cannot tell: {why}")


def test_dropout_is_told_of_layers_of_adapters_and_of_attention(gap: Callable[..., Outcome[None]]) -> None:
    learner = load_learner()
    assert dropout_of(learner) == 0.0
    learner.model.language_model.layers[0].self_attn.attention_dropout = 0.05  # type: ignore[union-attr, index]
    assert dropout_of(learner) == 0.05
    assert dropout_of(with_adapter(0.1)) == 0.1
    assert gap(learner_dropout=0.1).verdict is Verdict.WARNING
    only_recorded = {"telemetry__record": True, "telemetry__log_probs": True, **decoding()}
    assert gap(only_recorded, learner_dropout=0.1).verdict is Verdict.OK


def with_adapter(dropout: float) -> Any:
    return get_peft_model(
        load_learner(), LoraConfig(lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
    )
