"""``/infer/`` over real HTTP: what is answered, what is merged, what fails alone."""

from __future__ import annotations

import base64
import copy
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from live_server import (
    CALL_TIMEOUT_S,
    RunningServer,
    call_and_wait,
    held_before,
    image_request,
    load_learner,
    picture,
    text_request,
)
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server.engine import JobAborted

BROKEN = {**image_request(), "images": [base64.b64encode(b"no picture").decode()]}


# So hot that every token is about equally likely, whatever the checkpoint has learnt.
HOT = {"temperature": 50.0, "seed": 3}


def block_engine(server: RunningServer) -> tuple[threading.Event, threading.Event]:
    """Keeps the engine's thread busy between two batches; returns (is blocked, let it go)."""
    blocked, release = threading.Event(), threading.Event()

    def hold() -> None:
        blocked.set()
        assert release.wait(CALL_TIMEOUT_S)

    server.engine._queue.put_task(hold)
    assert blocked.wait(CALL_TIMEOUT_S)
    return blocked, release


def wait_until_queued(server: RunningServer, num_jobs: int) -> None:
    queue = server.engine._queue
    with queue._changed:
        assert queue._changed.wait_for(lambda: len(queue._waiting) == num_jobs, CALL_TIMEOUT_S)


def hugging_face_answer(
    model: torch.nn.Module,
    prompt: tuple[int, ...],
    max_new_tokens: int,
    image: Any = None,
    others: Mapping[int, torch.nn.Module] = MappingProxyType({}),
) -> list[int]:
    """Greedy continuation by plain ``generate``, one row, no server code.

    ``others``: whose weights take the model's place behind so many tokens; what was computed stays.
    """
    from transformers import AutoImageProcessor

    model = copy.deepcopy(model)

    def change_weights(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if (other := others.get(ids.shape[1] - len(prompt))) is not None:
            model.load_state_dict(other.state_dict())
        return torch.zeros(1, dtype=torch.bool)

    inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt])}
    if image is not None:
        from live_server import MODEL

        processor = AutoImageProcessor.from_pretrained(MODEL)
        inputs |= dict(processor(images=[image], do_resize=False, return_tensors="pt"))
        image_token = model.config.image_token_id  # type: ignore[union-attr]
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_token).long()
    answer = model.generate(  # type: ignore[operator]
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, stopping_criteria=[change_weights]
    )
    return list(answer[0, len(prompt) :].tolist())


def test_the_reply_is_a_stock_record_with_a_stamp(server: RunningServer) -> None:
    from swift.infer_engine.protocol import RolloutOutput

    asked = [image_request(), {**text_request(), "uuid": "one"}]
    body = server.post_infer(asked).json()
    for item in body:
        output = RolloutOutput(**item)
        choice = output.response.choices[0]
        assert choice.token_ids
        assert output.response.prompt_token_ids
        assert output.response.usage.completion_tokens == len(choice.token_ids)
    stamp = server.engine.stamp
    expected = {"weight_version": stamp.version, "run_id": stamp.run_id, "spans": [], "request_id": "one"}
    assert body[1]["rollout_infos"]["stage2"] == expected
    assert body[0]["response"]["images_size"] == [[112, 112]]
    assert body[1]["response"]["images_size"] == []


def test_prompt_ids_are_those_of_the_template(server: RunningServer) -> None:
    template = server.engine.generator.template
    (completion,) = server.infer([image_request()])
    sample = {"messages": image_request()["messages"], "images": [picture()]}
    assert completion.prompt_token_ids == tuple(template.encode(sample)["input_ids"])


def test_a_greedy_answer_equals_hugging_faces(server: RunningServer) -> None:
    weights = dict(server.engine.generator.model.named_parameters())
    model = load_learner()
    model.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False)
    (text, image) = server.infer([text_request(), image_request(shade=30)], max_tokens=12)
    assert list(text.token_ids) == hugging_face_answer(model, text.prompt_token_ids, 12)
    assert list(image.token_ids) == hugging_face_answer(model, image.prompt_token_ids, 12, picture(30))


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(server: RunningServer) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        return server.infer([image_request()], temperature=50.0, seed=seed, max_tokens=16)[0].token_ids

    assert draw(11) == draw(11)
    assert draw(11) != draw(12)


def test_length_is_said_only_of_an_answer_that_was_cut(server: RunningServer) -> None:
    stop_ids = set(server.engine.generator._stop_ids())
    requests = [text_request(str(n)) for n in range(8)]
    reasons = set()
    for max_tokens in (3, 400):  # 8 rows of 400 tokens over about 600 of which two are ends
        for answer in server.infer(requests, max_tokens=max_tokens, **HOT):
            reasons.add(answer.finish_reason)
            assert stop_ids.isdisjoint(answer.token_ids[:-1])
            if answer.token_ids[-1] in stop_ids:  # the end token is kept, and is the reason
                assert answer.finish_reason == "stop"
            else:
                assert (answer.finish_reason, len(answer.token_ids)) == ("length", max_tokens)
    assert reasons == {"stop", "length"}


def test_calls_of_several_callers_share_one_batch_and_keep_their_own_answers(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [[text_request(f"{caller} {n}") for n in range(3)] for caller in range(4)]
    seeds = [101, 102, 103, 104]
    alone = [server.infer(call, temperature=1.0, seed=seed) for call, seed in zip(calls, seeds, strict=True)]
    _, release = block_engine(server)
    run_batch = Mock(side_effect=server.engine._run_batch)
    monkeypatch.setattr(server.engine, "_run_batch", run_batch)
    with ThreadPoolExecutor(len(calls)) as callers:
        futures = [
            callers.submit(server.infer, call, temperature=1.0, seed=seed)
            for call, seed in zip(calls, seeds, strict=True)
        ]
        wait_until_queued(server, 12)
        release.set()
        merged = [future.result(CALL_TIMEOUT_S) for future in futures]
    assert [len(call.args[0]) for call in run_batch.call_args_list] == [12]
    for own, shared in zip(alone, merged, strict=True):
        assert [c.prompt_token_ids for c in own] == [c.prompt_token_ids for c in shared]
        # Another batch shape may round a logit differently; the first draw of nearly all rows is safe.
        assert sum(a.token_ids[:1] == b.token_ids[:1] for a, b in zip(own, shared, strict=True)) >= 2


def test_one_poisonous_image_fails_its_own_call_and_no_other(server: RunningServer) -> None:
    poisoned = [image_request(shade) for shade in range(8)]
    poisoned[5] = BROKEN
    with ThreadPoolExecutor(2) as callers:
        bad = callers.submit(server.post_infer, poisoned)
        good = callers.submit(server.infer, [image_request(shade) for shade in range(4)])
        assert len(good.result(CALL_TIMEOUT_S)) == 4
        reply = bad.result(CALL_TIMEOUT_S)
    assert reply.status_code == 500
    assert [failure["index"] for failure in reply.json()["failures"]] == [5]
    assert "image" in reply.json()["detail"]
    assert len(server.infer([*poisoned[:5], *poisoned[6:]])) == 7


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        ({**text_request(), "extra": 1}, "extra"),
        (text_request("word " * 5000), "4096"),
    ],
)
def test_a_bad_request_is_named_with_its_index_and_cause(
    server: RunningServer, request_: dict[str, Any], cause: str
) -> None:
    reply = server.post_infer([text_request(), request_])
    assert reply.status_code == 500
    (failure,) = reply.json()["failures"]
    assert failure["index"] == 1
    assert cause in failure["cause"]
    assert "\n" not in reply.json()["detail"]


def test_health_answers_while_the_engine_is_busy(server: RunningServer) -> None:
    _, release = block_engine(server)
    with ThreadPoolExecutor(1) as caller:
        running = caller.submit(server.infer, [text_request()])
        wait_until_queued(server, 1)
        reply = server.http.get(wire.HEALTH)
        assert not running.done()
        release.set()
        running.result(CALL_TIMEOUT_S)
    assert reply.status_code == 200
    assert reply.json()["num_waiting"] == 1


def test_a_caller_that_goes_away_does_not_keep_the_server_busy(server: RunningServer) -> None:
    body = json.dumps({"infer_requests": [text_request()], "request_config": {"max_tokens": 4000, **HOT}})
    with held_before(server, 2) as (stopped, go_on):
        with closing(call_and_wait(server, wire.INFER, body.encode())):
            assert stopped.wait(CALL_TIMEOUT_S)
            (job,) = server.engine._open
        wait_for(lambda: job.aborted)
        go_on.set()
        with pytest.raises(JobAborted):
            job.future.result(CALL_TIMEOUT_S)
