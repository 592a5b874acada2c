"""Rows are drawn and ended one by one; the manifest without weights equals what the learner exports with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_server import MODEL
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from swift_stage2.rollout_server.swift_generator import RowEnd, RowLedger, RowSampler, draw_uniforms
from swift_stage2.weights.export import WeightExport


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_learners_manifest_in_the_engines_dtype(tmp_path: Path, tied: bool) -> None:
    from swift_stage2.demo import tiny_template
    from swift_stage2.rollout_server.swift_generator import checkpoint_manifest

    tiny_template.register()
    model_dir = tmp_path / "model"
    shutil.copytree(MODEL, model_dir)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")

    from transformers import Qwen2_5_VLForConditionalGeneration

    learner = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    wanted = {spec.name: spec.shape for spec in WeightExport(learner).manifest()}
    assert ("lm_head.weight" in wanted) is not tied
    told = checkpoint_manifest(str(model_dir), tiny_template.TINY_VL, torch.bfloat16)
    assert {spec.name: spec.shape for spec in told} == wanted
    assert {spec.dtype for spec in told} == {"bfloat16"}


CPU = torch.device("cpu")
NO_TOKENS = torch.zeros((1, 0), dtype=torch.long)


def chosen(scores: torch.Tensor) -> list[int]:
    return [int(index) for index in scores.argmax(-1)]


@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_the_drawn_token_is_where_the_cumulative_probability_passes_the_uniform(
    logits: list[float], uniform: float
) -> None:
    sampler = RowSampler((), torch.tensor([[uniform]], dtype=torch.float64), with_log_probs=False)
    token = chosen(sampler(NO_TOKENS, torch.tensor([logits])))[0]
    weights = np.exp(np.array(logits, dtype=np.float64))
    edges = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
    assert edges[token] - 1e-6 <= uniform <= edges[token + 1] + 1e-6


def test_frequencies_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_rows = 4000
    uniforms = draw_uniforms(list(range(1, num_rows + 1)), 1, CPU)
    sampler = RowSampler((), uniforms, with_log_probs=False)
    tokens = chosen(sampler(NO_TOKENS, probabilities.log().expand(num_rows, -1).clone()))
    counts = torch.bincount(torch.tensor(tokens), minlength=4).double()
    expected = probabilities.double() * num_rows
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 21.1  # 3 degrees of freedom, p = 1e-4; the seeds are fixed


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    alone = draw_uniforms([7], 5, CPU)
    among = draw_uniforms([3, 7, 9], 5, CPU)
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(among[0], among[1])
    # A longer limit changes nothing before it
    assert torch.equal(draw_uniforms([7], 3, CPU)[0], alone[0, :3])


def test_warpers_act_before_the_draw() -> None:
    warpers = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(1)]
    uniforms = torch.tensor([[0.999]], dtype=torch.float64)
    sampler = RowSampler(warpers, uniforms, with_log_probs=True)
    assert chosen(sampler(NO_TOKENS, torch.tensor([[1.0, 3.0, 2.0]]))) == [1]
    assert sampler.log_probs() == [[0.0]]


def test_greedy_log_probs_are_the_models() -> None:
    sampler = RowSampler((), None, with_log_probs=True)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert chosen(sampler(NO_TOKENS, logits.clone())) == [2]
    log_probs = sampler.log_probs()
    assert log_probs is not None
    assert log_probs[0][0] == pytest.approx(2.0 - np.log(1 + np.e + np.e**2), abs=1e-6)


def ledger(limits: list[int], aborted: list[bool] | None = None) -> RowLedger:
    flags = aborted if aborted is not None else [False] * len(limits)
    return RowLedger(
        prompt_length=2,
        limits=limits,
        stop_token_ids=[0, 9],
        between_tokens=lambda num_tokens: flags,
        device=CPU,
    )


def feed(book: RowLedger, *steps: list[int]) -> list[list[bool]]:
    rows = len(steps[0])
    tokens = torch.full((rows, 2), 5)
    answers = []
    for step in steps:
        tokens = torch.cat([tokens, torch.tensor(step)[:, None]], dim=1)
        answers.append(book(tokens, torch.empty(0)).tolist())
    return answers


def test_each_row_ends_at_its_own_stop_or_limit() -> None:
    book = ledger([3, 2, 3])
    answers = feed(book, [1, 1, 1], [9, 1, 1], [0, 0, 0])
    assert answers == [[False, False, False], [True, True, False], [True, True, True]]
    # A stop token in the very last place is an end of turn, not a cut; what padding follows does not count.
    assert book.ends() == [(2, RowEnd.STOP), (2, RowEnd.LENGTH), (3, RowEnd.STOP)]


def test_an_aborted_row_keeps_what_it_had_and_others_go_on() -> None:
    flags = [False, False]
    book = ledger([5, 5], flags)
    feed(book, [1, 1])
    flags[0] = True
    tokens = torch.full((2, 4), 1)
    assert book(tokens, torch.empty(0)).tolist() == [True, False]
    assert book.ends() == [(2, RowEnd.ABORT), (2, RowEnd.RUNNING)]
