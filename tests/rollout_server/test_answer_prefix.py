"""Answers that were cut and go on: what an abort hands over, what a prefix may be, and that nobody sees the seam."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cut_rollouts import (
    BATCH,
    MEDIA_IDS,
    REFUSED,
    TOLERANCE,
    Comparison,
    Oracle,
    Scene,
    abort,
    compare_aborted,
    compare_cut,
    draw_scenes,
    log_probs_agree,
    require_refusal,
    resume,
)
from family_models import FAMILIES, family_directory, template_type
from live_server import (
    CALL_TIMEOUT_S,
    LearnerRound,
    RunningServer,
    held_before,
    load_learner,
    text_request,
)
from test_infer import HOT

from swift_stage2 import wire
from swift_stage2.rollout_server.engine import GenerationRequest
from swift_stage2.servers.infer_wire import PREFIX, Completion, SamplingOptions
from swift_stage2.servers.request_checks import RequestLimits, check_conversations
from swift_stage2.wire import ServerInfo


def answers_cut_in_flight(
    server: RunningServer, scenes: Sequence[Scene], num_tokens: int
) -> list[Completion]:
    """An ``/infer/`` call whose rows are aborted over HTTP once they have so many tokens, if they get there."""
    with held_before(server, num_tokens) as (stopped, go_on), ThreadPoolExecutor(1) as caller:
        call = caller.submit(resume, server, scenes, [()] * len(scenes))
        assert stopped.wait(CALL_TIMEOUT_S)
        assert abort(server) == len(scenes)
        go_on.set()
        return call.result(CALL_TIMEOUT_S)


def test_greedy_rollouts_go_on_as_if_they_had_not_been_cut(server: RunningServer) -> None:
    LearnerRound(server, load_learner()).run()
    rng, comparison = random.Random(5), Comparison(Oracle(load_learner()), TOLERANCE)
    compare_cut(server, comparison, BATCH, rng)
    scenes, num_tokens = draw_scenes(BATCH, rng), rng.randint(1, 40)
    answers = answers_cut_in_flight(server, scenes, num_tokens)
    aborted = [answer for answer in answers if answer.finish_reason == "abort"]
    assert {len(answer.token_ids) for answer in aborted} == {num_tokens}
    assert compare_aborted(server, comparison, scenes, answers) == len(aborted)
    assert comparison.num_compared > BATCH


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_answers_of_every_family_go_on_behind_their_images(family: str) -> None:
    from swift_stage2.rollout_server.swift_generator import SwiftGenerator

    generator = SwiftGenerator(
        str(family_directory(family)),
        model_type=family,
        template_type=template_type(family),
        torch_dtype=torch.float32,
        device_map="cpu",
    )
    generator.prepare()
    scenes, greedy, rng = draw_scenes(8, random.Random(2)), SamplingOptions(temperature=0.0), random.Random(3)

    def answers(prefixes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        rows = [
            generator.encode_row(GenerationRequest(scene.request(), greedy, 24, prefix=prefix))
            for scene, prefix in zip(scenes, prefixes, strict=True)
        ]
        made = generator.generate_rows(rows, greedy, aborted=lambda: [False] * len(rows))
        return [row.token_ids for row in made]

    wholes = answers([()] * len(scenes))
    prefixes = [whole[: rng.randrange(len(whole))] for whole in wholes]
    assert [(*prefix, *rest) for prefix, rest in zip(prefixes, answers(prefixes), strict=True)] == wholes
    assert len(set(wholes)) > len(scenes) // 2


def test_prompt_and_prefix_share_one_budget_with_the_rest(server: RunningServer) -> None:
    (whole,) = server.infer([text_request()], max_tokens=24)
    for num_before, num_after in ((1, 1), (5, 3), (20, 4)):
        prefix = list(whole.token_ids[:num_before])
        (rest,) = server.infer([{**text_request(), PREFIX: prefix}], max_tokens=num_before + num_after)
        assert rest.token_ids == whole.token_ids[num_before : num_before + num_after]
        assert rest.finish_reason == "length"
    long = [whole.token_ids[0]] * 4094
    reply = server.post_infer([{**text_request(), PREFIX: long}], max_tokens=5000)
    assert (reply.status_code, reply.json()["failures"][0]["index"]) == (500, 0)
    assert "prefix_tokens=4094 max_model_len=4096" in reply.json()["detail"]


def test_a_resumed_call_draws_by_its_seed_and_its_prefix(server: RunningServer) -> None:
    def draw(seed: int, prefix: Sequence[int]) -> tuple[int, ...]:
        request = {**text_request(), PREFIX: list(prefix)}
        options = {**HOT, "max_tokens": len(prefix) + 12, "seed": seed}
        return server.infer([request], **options)[0].token_ids

    assert draw(3, [270, 271]) == draw(3, [270, 271])
    assert draw(3, [270, 271]) != draw(4, [270, 271])
    # Numbers that the first part was drawn with come again in no other part, even if the caller repeats its seed.
    requests = [
        GenerationRequest({**text_request(), "images": []}, seed=3, prefix=prefix)
        for prefix in ((), (270,), (270, 271))
    ]
    assert len({server.engine.generator.encode_row(request).seed for request in requests}) == 3


def test_log_probs_of_whole_and_of_resumed_answers_are_the_learners(server: RunningServer) -> None:
    """Unasked there are none; answers with ids that stand for images are left out."""
    learner = load_learner(seed=63)
    LearnerRound(server, learner).run()
    oracle, scenes = Oracle(learner), draw_scenes(6, random.Random(3))
    drawn = {"temperature": 0.8, "repetition_penalty": 1.0, "seed": 5, "max_tokens": 20}
    prefixes = [(), (270, 271, 272)] * 3
    assert {answer.log_probs for answer in resume(server, scenes, prefixes, **drawn)} == {None}
    answers = resume(server, scenes, prefixes, logprobs=True, **drawn)
    known = [i for i, answer in enumerate(answers) if MEDIA_IDS.isdisjoint(answer.token_ids)]
    assert len(known) == 6
    assert all(log_probs_agree(oracle, scenes[i], prefixes[i], answers[i], 0.8) for i in known)


@pytest.mark.parametrize(("prefix", "options", "cause"), REFUSED)
def test_a_prefix_that_no_answer_has_is_refused_with_its_index(
    server: RunningServer, prefix: Any, options: dict[str, Any], cause: str
) -> None:
    require_refusal(server, prefix, options, cause)


def test_a_prefix_has_one_continuation(server: RunningServer) -> None:
    reply = server.post_infer([{**text_request(), PREFIX: [270]}], n=2)
    assert (reply.status_code, "request_config.n" in reply.json()["detail"]) == (422, True)


def test_servers_say_whether_they_resume_and_others_refuse_a_prefix(server: RunningServer) -> None:
    info = server.http.get(wire.SERVER_INFO).json()
    assert ServerInfo.from_json(info).resume
    del info["resume"]  # a server of an older release
    assert not ServerInfo.from_json(info).resume
    assert not ServerInfo(stock=True).resume
    # What stands in front of a server that would ignore it: the merger, and an engine that cannot.
    (fault,) = check_conversations([{**text_request(), PREFIX: [270]}], RequestLimits()).values()
    assert f"leave {PREFIX} out" in str(fault)
