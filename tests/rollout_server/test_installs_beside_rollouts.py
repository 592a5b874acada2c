"""Installs into the real server over real sockets: who is answered by which weights, and who waits."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import Any

import pytest
from live_server import (
    CALL_TIMEOUT_S,
    GREEDY,
    LearnerRound,
    RunningServer,
    call_and_wait,
    held_before,
    hold_copies,
    load_learner,
    picture,
    text_request,
)
from test_control_calls import status_of
from test_infer import block_engine, hugging_face_answer, wait_until_queued
from test_installs import own_checksums
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.servers.infer_wire import Completion
from swift_stage2.wire import WeightProof

MANY = 40  # more than all threads of the server's pools
pytestmark = pytest.mark.usefixtures("checkpoints_weights_again")
QUESTION = json.dumps({"infer_requests": [text_request()], "request_config": GREEDY}).encode()


def is_shut(server: RunningServer) -> bool:
    return server.service.slot._gate is not None


def num_waiting(server: RunningServer) -> int:
    """Calls that have come to the shut gate, also those that have left since."""
    gate = server.service.slot._gate
    return len(gate._done_callbacks) if gate is not None else 0


def offered(server: RunningServer, seed: int, *, shared: bool = False) -> LearnerRound:
    """Everything before the install."""
    round_ = LearnerRound(server, load_learner(seed=seed))
    if shared:
        round_.push_shared().close()  # the server's mapping holds it
    else:
        round_.push()
        round_.close()
    return round_


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shared memory"])
def test_new_weights_come_between_two_tokens_of_what_runs(server: RunningServer, shared: bool) -> None:
    old = load_learner(seed=40)
    before = LearnerRound(server, old)
    before.run()
    learner = load_learner(seed=52)
    round_ = LearnerRound(server, learner)
    file = round_.push_shared() if shared else round_.push()
    assert file is None or file.num_mapped
    with held_before(server, 3) as (stopped, go_on), ThreadPoolExecutor(3) as callers:
        early = callers.submit(server.infer, [text_request("early")], max_tokens=12)
        assert stopped.wait(CALL_TIMEOUT_S)
        installing = callers.submit(round_.install)
        wait_for(lambda: len(server.engine._queue._tasks) == 1)
        late = callers.submit(server.infer, [text_request("late")], max_tokens=12)
        wait_for(lambda: num_waiting(server) == 1)
        go_on.set()
        (answer,) = early.result(CALL_TIMEOUT_S)
        assert answer.spans == ((before.version, 3), (round_.version, 9))
        expected = hugging_face_answer(old, answer.prompt_token_ids, 12, others={3: learner})
        assert list(answer.token_ids) == expected
        proof = WeightProof.from_json(installing.result(CALL_TIMEOUT_S).json())
        assert proof.vouches_for(own_checksums(learner))
        (answer,) = late.result(CALL_TIMEOUT_S)
    round_.close()
    assert (answer.weight_version, answer.run_id) == (round_.version, round_.run_id)
    assert list(answer.token_ids) == hugging_face_answer(learner, answer.prompt_token_ids, 12)
    info = wire.ServerInfo.from_json(server.http.get(wire.SERVER_INFO).json())
    assert (info.weight_version, info.state) == (round_.version, "serving")
    if file is not None:
        file.close()


def require_answers_as_stamped(server: RunningServer, requests: list[dict[str, Any]]) -> None:
    """Callers ask all the time; each token must be that of the weights that it is stamped with."""
    modules: dict[int | None, Any] = {}
    answers: list[Completion] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.extend(server.infer(requests))

    with ThreadPoolExecutor(3) as callers:
        asking = [callers.submit(ask) for _ in range(3)]
        try:
            for seed in (42, 43, 44):
                round_ = offered(server, seed, shared=seed == 44)
                modules[round_.version] = load_learner(seed=seed)
                assert round_.install().status_code == 200
                seen = len(answers)
                wait_for(lambda: len(answers) > seen + 6)  # noqa: B023
        finally:
            stop.set()
        for each in asking:
            each.result(CALL_TIMEOUT_S)
    stamped = [answer for answer in answers if answer.weight_version in modules]
    assert {answer.weight_version for answer in stamped} == set(modules)
    expected: dict[Any, list[int]] = {}
    for answer in stamped:
        spans = answer.spans or ((answer.weight_version, len(answer.token_ids)),)
        key = (spans, answer.prompt_token_ids)
        if key not in expected and spans[0][0] in modules:
            image = picture(70) if answer.images_size else None
            begins = accumulate(num_tokens for _, num_tokens in spans[:-1])
            others = {begin: modules[version] for begin, (version, _) in zip(begins, spans[1:], strict=True)}
            first, prompt = modules[spans[0][0]], answer.prompt_token_ids
            expected[key] = hugging_face_answer(first, prompt, GREEDY["max_tokens"], image, others)
        assert list(answer.token_ids) == expected.get(key, list(answer.token_ids))
    assert expected


def test_every_token_is_of_the_weights_that_it_is_stamped_with(server: RunningServer) -> None:
    require_answers_as_stamped(server, [text_request()])


@pytest.mark.parametrize("sums", ["as sent", "others"])
def test_calls_that_wait_hold_no_threads_and_are_all_told_what_has_become_of_the_weights(
    server: RunningServer, sums: str
) -> None:
    round_ = offered(server, 48)
    _, release = block_engine(server)
    with ExitStack() as stack, ThreadPoolExecutor(2) as callers:
        early = callers.submit(server.infer, [text_request("early")])
        wait_until_queued(server, 1)
        options = {} if sums == "as sent" else {"checksums": {"a": "0"}}
        installing = callers.submit(round_.install, **options)
        wait_for(lambda: is_shut(server))
        waiting = [
            stack.enter_context(closing(call_and_wait(server, wire.INFER, QUESTION))) for _ in range(MANY)
        ]
        wait_for(lambda: num_waiting(server) == MANY)
        assert server.http.get(wire.HEALTH).status_code == 200
        release.set()
        assert early.result(CALL_TIMEOUT_S)
        assert installing.result(CALL_TIMEOUT_S).status_code == 200
        assert {status_of(each) for each in waiting} == {200 if sums == "as sent" else 409}


@pytest.mark.parametrize("ending", ["proven", "other sums", "torn"])
def test_the_learners_memory_is_let_go_when_the_install_ends(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Without the garbage collector, which may come much later."""
    round_ = LearnerRound(server, load_learner(seed=58))
    gc.disable()
    try:
        file = round_.push_shared()
        assert file.num_mapped == 1
        if ending == "torn":
            model = server.engine.generator.model
            monkeypatch.setattr(model, "named_parameters", lambda: iter(()))
        status = round_.install(**({"checksums": {}} if ending == "other sums" else {})).status_code
        assert status == (500 if ending == "torn" else 200)
        wait_for(lambda: file.num_mapped == 0)
    finally:
        gc.enable()
    file.close()


def test_a_copy_that_outlives_its_install_lets_nobody_in_and_the_next_install_waits_for_it(
    server: RunningServer,
) -> None:
    """And what it reads is not written over by the next offer."""
    begun, go_on = hold_copies(server)
    round_ = offered(server, 61)
    being_read = server.service.slot._memory
    failed = round_.install(timeout_s=3.0)
    assert (failed.status_code, begun.is_set()) == (500, True), failed.text
    assert server.state() == "unproven"
    assert offered(server, 62).install(timeout_s=0.5).status_code == 500
    assert server.service.slot._memory is not being_read
    last = offered(server, 63)
    go_on.set()
    assert last.install().status_code == 200
    assert server.infer([text_request()])[0].weight_version == last.version
