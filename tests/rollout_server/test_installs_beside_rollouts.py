"""Staged rounds into the real server over real sockets: who is answered by which weights, and who waits."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from live_server import (
    CALL_TIMEOUT_S,
    GREEDY,
    LearnerRound,
    RunningServer,
    load_learner,
    serve,
    text_request,
)
from test_control_calls import call_and_wait, status_of
from test_infer import block_engine, hugging_face_answer, wait_until_queued
from test_sync_round import own_checksums
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine
from swift_stage2.servers.infer_wire import Completion, parse_infer_reply, protect_from_abort
from swift_stage2.wire import RoundProof

MANY = 40  # more than all threads of the server's pools
pytestmark = pytest.mark.usefixtures("checkpoints_weights_again")
QUESTION = json.dumps({"infer_requests": [text_request()], "request_config": GREEDY}).encode()


def is_shut(server: RunningServer) -> bool:
    return server.service.rounds._door._opened is not None


def num_waiting(server: RunningServer) -> int:
    """Calls that have come to the shut door, also those that have left since."""
    opened = server.service.rounds._door._opened
    return len(opened._done_callbacks) if opened is not None else 0


def staged_round(server: RunningServer, seed: int, *, shared: bool = False) -> LearnerRound:
    """Everything before the install."""
    round_ = LearnerRound(server, load_learner(seed=seed), staged=True)
    assert round_.begin().status_code == 200
    if shared:
        round_.push_shared().close()  # the server's mapping holds it
    else:
        round_.push()
    return round_


def finish(round_: LearnerRound, **options: Any) -> None:
    round_.close()
    reply = round_.finish(**options)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shared memory"])
def test_old_weights_answer_until_the_install_and_new_ones_after_the_proof(
    server: RunningServer, shared: bool
) -> None:
    before = LearnerRound(server, load_learner(seed=40))
    before.run()
    learner = load_learner(seed=41)
    round_ = LearnerRound(server, learner, staged=True)
    assert round_.begin().status_code == 200
    file = round_.push_shared() if shared else round_.push()
    assert file is None or file.num_mapped
    _, release = block_engine(server)
    with ThreadPoolExecutor(3) as callers:
        early = callers.submit(server.infer, [text_request("early")])
        wait_until_queued(server, 1)
        loading = callers.submit(round_.load)
        wait_for(lambda: is_shut(server))
        late = callers.submit(server.infer, [text_request("late")], max_tokens=12)
        wait_for(lambda: num_waiting(server) == 1)
        release.set()
        (answer,) = early.result(CALL_TIMEOUT_S)
        assert (answer.weight_version, answer.round_id) == (before.version, before.round_id)
        assert loading.result(CALL_TIMEOUT_S).status_code == 200
        for path in (wire.RESET_PREFIX_CACHE, wire.RESET_ENCODER_CACHE, wire.RESET_MM_CACHE):
            assert wire.parse_cache_reset(round_.post(path).json())
        canary = server.post_infer([text_request()], round_id=round_.round_id).json()
        stamp = canary[0]["rollout_infos"]["stage2"]
        assert (stamp["round_id"], stamp["proven"]) == (round_.round_id, False)
        assert not late.done()
        round_.close()
        sums = own_checksums(learner)
        proof = RoundProof.from_json(round_.finish(checksums=sums).json())
        assert proof.arrived == proof.resident == sums
        (answer,) = late.result(CALL_TIMEOUT_S)
    assert (answer.weight_version, answer.round_id) == (round_.version, round_.round_id)
    assert list(answer.token_ids) == hugging_face_answer(learner, answer.prompt_token_ids, 12)
    info = wire.ServerInfo.from_json(server.http.get(wire.SERVER_INFO).json())
    assert (info.staging, info.round_id, info.state) == (True, round_.round_id, "serving")
    if file is not None:
        file.close()


def test_a_completion_never_mixes_two_rounds(server: RunningServer) -> None:
    """Callers ask all the time; each answer must be that of the weights that it is stamped with."""
    first = LearnerRound(server, load_learner(seed=42))
    first.run()
    modules = {first.round_id: load_learner(seed=42)}
    answers: list[Completion] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http:
            while not stop.is_set():
                reply = http.post(wire.INFER, content=QUESTION)
                assert reply.status_code == 200, reply.text
                answers.extend(parse_infer_reply(reply.json(), 1))

    with ThreadPoolExecutor(3) as callers:
        asking = [callers.submit(ask) for _ in range(3)]
        try:
            for seed in (43, 44):
                round_ = staged_round(server, seed, shared=seed == 44)
                modules[round_.round_id] = load_learner(seed=seed)
                assert round_.load(on_pending="abort" if seed == 43 else "wait").status_code == 200
                finish(round_)
                seen = len(answers)
                wait_for(lambda: len(answers) > seen + 6)  # noqa: B023
        finally:
            stop.set()
        for each in asking:
            each.result(CALL_TIMEOUT_S)
    assert {answer.round_id for answer in answers} == set(modules)
    expected = {
        round_id: hugging_face_answer(module, answers[0].prompt_token_ids, GREEDY["max_tokens"])
        for round_id, module in modules.items()
    }
    for answer in answers:
        whole = expected[str(answer.round_id)]
        assert list(answer.token_ids) == whole[: len(answer.token_ids)]
        assert answer.finish_reason == "abort" or list(answer.token_ids) == whole


def test_an_install_may_abort_what_runs_but_not_what_must_not_be_aborted(server: RunningServer) -> None:
    LearnerRound(server, load_learner(seed=45)).run()
    round_ = staged_round(server, 46)
    _, release = block_engine(server)
    with ThreadPoolExecutor(3) as callers:
        plain = callers.submit(server.infer, [text_request("plain")])
        evaluation = callers.submit(server.infer, [protect_from_abort(text_request("evaluation"))])
        wait_until_queued(server, 2)
        loading = callers.submit(round_.load, on_pending="abort")
        (aborted,) = plain.result(CALL_TIMEOUT_S)  # although the engine is held up
        assert (aborted.finish_reason, aborted.weight_version) == ("abort", round_.version - 1)
        assert is_shut(server)
        assert not loading.done()
        release.set()
        (whole,) = evaluation.result(CALL_TIMEOUT_S)
        assert (whole.finish_reason != "abort", whole.weight_version) == (True, round_.version - 1)
        assert loading.result(CALL_TIMEOUT_S).status_code == 200
    finish(round_)


def test_calls_that_wait_hold_no_threads_and_are_all_answered(server: RunningServer) -> None:
    round_ = staged_round(server, 48)
    assert round_.load().status_code == 200
    with ExitStack() as stack:
        waiting = [
            stack.enter_context(closing(call_and_wait(server, wire.INFER, QUESTION))) for _ in range(MANY)
        ]
        wait_for(lambda: num_waiting(server) == MANY)
        assert server.http.get(wire.HEALTH).status_code == 200
        assert server.post_infer([text_request()], round_id=round_.round_id).status_code == 200
        finish(round_)
        assert {status_of(each) for each in waiting} == {200}


@pytest.mark.parametrize("ending", ["given up", "other sums"])
def test_those_that_waited_hear_that_the_weights_are_unproven(server: RunningServer, ending: str) -> None:
    round_ = staged_round(server, 49)
    assert round_.load().status_code == 200
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(server.post_infer, [text_request()])
        wait_for(lambda: num_waiting(server) == 1)
        finish(round_, **({"commit": False} if ending == "given up" else {"checksums": {"a": "0"}}))
        refused = waiting.result(CALL_TIMEOUT_S)
    assert (refused.status_code, refused.json()["reason"]) == (409, "unproven")


def test_what_does_not_end_in_time_keeps_the_old_weights(server: RunningServer) -> None:
    LearnerRound(server, load_learner(seed=51)).run()
    stamp = server.engine.stamp
    round_ = staged_round(server, 52, shared=True)
    held = server.service.rounds._round
    assert held is not None
    _, release = block_engine(server)
    with ThreadPoolExecutor(3) as callers:
        running = callers.submit(server.infer, [text_request()])
        wait_until_queued(server, 1)
        loading = callers.submit(round_.load)
        wait_for(lambda: is_shut(server))
        waiting = callers.submit(server.infer, [text_request()])
        wait_for(lambda: num_waiting(server) == 1)
        held.end = server.service.rounds._clock() + 0.1
        assert loading.result(CALL_TIMEOUT_S).status_code == 500
        assert server.state() == "serving"
        release.set()
        answers = [*running.result(CALL_TIMEOUT_S), *waiting.result(CALL_TIMEOUT_S)]
    assert {answer.round_id for answer in answers} == {stamp.round_id}
    assert server.engine.stamp == stamp
    assert round_.finish().json()["reason"] == "no_round"


def test_two_learners_of_a_run_that_was_frozen_do_not_mix(server: RunningServer) -> None:
    """The first wakes when its successor has begun a round; whatever it still sends changes nothing."""
    first = staged_round(server, 55)
    second = LearnerRound(server, load_learner(seed=56), staged=True)
    assert second.begin().status_code == 200
    late = [
        first.share(),
        first.load(on_pending="abort"),
        first.post(wire.RESET_PREFIX_CACHE),
        first.post(wire.RESET_ENCODER_CACHE),
        first.post(wire.RESET_MM_CACHE),
        first.post(wire.INIT_COMMUNICATOR, {"port": 1, "backend": wire.WEIGHT_STREAM, "num_bytes": 1}),
        first.post(wire.INIT_COMMUNICATOR, {"backend": wire.DISK}),
        first.finish(commit=False),
        first.server.post(wire.FINISH_ROUND, {"round_id": second.round_id, "commit": False}, first.round_id),
    ]
    assert {(reply.status_code, reply.json().get("reason")) for reply in late} == {(409, "no_round")}
    first.close()
    second.push()
    assert second.load().status_code == 200
    finish(second)
    assert server.infer([text_request()])[0].round_id == second.round_id


@pytest.mark.parametrize("ending", ["proven", "given up", "torn"])
def test_the_learners_memory_is_let_go_when_the_round_ends(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Without the garbage collector, which may come much later."""
    round_ = LearnerRound(server, load_learner(seed=58), staged=True)
    assert round_.begin().status_code == 200
    gc.disable()
    try:
        file = round_.push_shared()
        assert file.num_mapped == 1
        if ending == "torn":
            model = server.engine.generator.model
            monkeypatch.setattr(model, "named_parameters", lambda: iter(()))
        status = round_.load().status_code
        assert status == (500 if ending == "torn" else 200)
        if ending != "torn":
            round_.finish(commit=ending != "given up")
        wait_for(lambda: file.num_mapped == 0)
    finally:
        gc.enable()
    file.close()


def test_a_copy_that_outlives_its_round_keeps_the_server_installing_until_it_ends(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it reads is not written over by the next round."""
    model = server.engine.generator.model
    named_parameters, begun, go_on = model.named_parameters, threading.Event(), threading.Event()

    def hang() -> Any:
        begun.set()
        assert go_on.wait(CALL_TIMEOUT_S)
        return named_parameters()

    monkeypatch.setattr(model, "named_parameters", hang)
    round_ = LearnerRound(server, load_learner(seed=61), staged=True)
    assert round_.begin(timeout_s=6.0).status_code == 200
    round_.push()
    being_read = server.service.rounds._memory
    failed = round_.load()
    assert (failed.status_code, begun.is_set()) == (500, True), failed.text
    assert server.state() == "installing"
    next_one = LearnerRound(server, load_learner(seed=62), staged=True)
    assert next_one.begin().status_code == 200
    next_one.connect()
    assert server.service.rounds._memory is not being_read
    next_one.close()
    next_one.finish(commit=False)
    assert server.state() == "installing"
    go_on.set()
    wait_for(lambda: server.state() == "unproven")
    round_.close()


def test_a_server_that_ends_lets_those_that_wait_go(loaded_engine: TransformersRolloutEngine) -> None:
    with serve(loaded_engine) as server, ThreadPoolExecutor(1) as caller:
        round_ = staged_round(server, 59)
        assert round_.load().status_code == 200
        waiting = caller.submit(server.post_infer, [text_request()])
        wait_for(lambda: num_waiting(server) == 1)
        server.service.end_work()
        assert waiting.result(CALL_TIMEOUT_S).status_code == 503
        round_.close()
