"""Our server on vLLM: answers that were cut go on as if they had not been, or by the new weights alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import AsyncMock

import pytest
from cut_rollouts import (
    BATCH,
    MEDIA_IDS,
    TOLERANCE,
    Comparison,
    Oracle,
    Scene,
    abort,
    compare_aborted,
    compare_cut,
    draw_scenes,
    log_probs_agree,
    resume,
)
from live_server import LearnerRound, RunningServer, load_learner
from our_server import engine_here
from sampled_packs import require_learners_log_probs
from test_vllm_engine import DEADLINE_S
from waiting import wait_for

from swift_stage2.servers.infer_wire import Completion


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with engine_here() as running:
        yield running


def num_made(server: RunningServer) -> list[int]:
    """Tokens that vLLM has given out so far, of each request that it holds."""
    states = list(server.engine._generator.engine.output_processor.request_states.values())
    return [len(state.detokenizer.output_token_ids) for state in states]


def answers_cut_in_flight(
    server: RunningServer, scenes: Sequence[Scene], num_tokens: int, **options: Any
) -> list[Completion]:
    """An ``/infer/`` call that is aborted over HTTP as soon as every request in flight has so many tokens, or more."""
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(resume, server, scenes, [()] * len(scenes), **options)
        wait_for(lambda: call.done() or min(num_made(server), default=0) >= num_tokens, DEADLINE_S)
        abort(server)
        return call.result(DEADLINE_S)


def test_greedy_rollouts_go_on_as_if_they_had_not_been_cut(server: RunningServer) -> None:
    LearnerRound(server, load_learner()).run()
    rng, comparison = random.Random(5), Comparison(Oracle(load_learner()), TOLERANCE)
    for _ in range(4):
        compare_cut(server, comparison, BATCH, rng)
    num_begun = 0
    while num_begun < 40:
        scenes = draw_scenes(BATCH, rng)
        answers = answers_cut_in_flight(server, scenes, rng.randint(0, 40))
        num_begun += compare_aborted(server, comparison, scenes, answers)
    assert len(comparison.gaps) <= 0.05 * comparison.num_compared


def rests_after_an_install(server: RunningServer, seed: int) -> list[bool]:
    """Aborts rollouts by an install of other weights and asks for the rest; which the new weights alone have made."""
    LearnerRound(server, load_learner(seed=seed)).run()
    learner = load_learner(seed=seed + 1)
    round_ = LearnerRound(server, learner)
    scenes = [scene for scene in draw_scenes(24, random.Random(seed)) if scene.images]
    file = round_.push_shared()
    endless = {"max_tokens": 800, "repetition_penalty": 1.5}
    with ThreadPoolExecutor(2) as callers:
        call = callers.submit(resume, server, scenes, [()] * len(scenes), **endless)
        # A block of vLLM's cache on a CPU has 128 tokens, and only full ones are kept.
        wait_for(lambda: min(num_made(server), default=0) >= 150, DEADLINE_S)
        installing = callers.submit(round_.install, on_pending="resume", timeout_s=DEADLINE_S)
        answers = call.result(DEADLINE_S)
        assert installing.result(DEADLINE_S).status_code == 200
    file.close()
    cut = [(scene, answer) for scene, answer in zip(scenes, answers, strict=True) if may_go_on(answer)]
    assert len(cut) >= 3
    oracle, agree = Oracle(learner), []
    for scene, answer in cut:
        prefix = answer.token_ids
        assert len(prefix) >= 150
        options = {"max_tokens": len(prefix) + 4, "repetition_penalty": 1.0, "logprobs": True}
        (rest,) = resume(server, [scene], [prefix], **options)
        assert rest.weight_version == round_.version != answer.weight_version
        assert rest.prompt_token_ids == answer.prompt_token_ids
        agree.append(log_probs_agree(oracle, scene, prefix, rest))
    return agree


def may_go_on(answer: Completion) -> bool:
    return answer.finish_reason == "abort" and MEDIA_IDS.isdisjoint(answer.token_ids)


@pytest.mark.parametrize(("left_out", "seed"), [(None, 71), ("prefix", 73), ("encoder", 75)])
def test_the_rest_of_an_answer_is_made_by_the_new_weights_alone(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, left_out: str | None, seed: int
) -> None:
    """Without a reset of either cache it is not, so that this test would see it. The mm cache holds pixels.

    Weights and scenes differ each time: what a cache kept of an earlier test would be right by chance.
    """
    if left_out is not None:
        left = AsyncMock(return_value=True)
        monkeypatch.setattr(server.engine._generator.engine, f"reset_{left_out}_cache", left)
    assert all(rests_after_an_install(server, seed)) == (left_out is None)


@pytest.mark.parametrize(("temperature", "of_greedy"), [(0.8, 0.8), (0.0, 1.0)])
def test_a_packs_log_probs_are_the_learners(
    server: RunningServer, rows: list[dict[str, Any]], temperature: float, of_greedy: float
) -> None:
    """Through client, segments and collator, of answers that were not cut."""
    require_learners_log_probs(server, rows, temperature, of_greedy)
