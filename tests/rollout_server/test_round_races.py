"""Rounds that end while their weights are on the way into the model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, load_learner, text_request
from test_infer import block_engine
from waiting import wait_for

from swift_stage2.servers import protocol as rollout_protocol


def test_a_round_that_is_replaced_while_it_loads_does_not_overwrite_its_successor(
    server: RunningServer,
) -> None:
    first = LearnerRound(server, load_learner(seed=20))
    assert first.begin().status_code == 200
    first.push()
    _, release = block_engine(server)
    with ThreadPoolExecutor(1) as caller:
        loading = caller.submit(first.load)
        wait_for(lambda: any(not hasattr(item, "request") for item in server.engine._queue._waiting))
        second = LearnerRound(server, load_learner(seed=21))
        assert second.begin().status_code == 200
        release.set()
        loading.result(CALL_TIMEOUT_S)
    first.close()
    second.push()
    assert second.load().status_code == 200
    assert second.finish().status_code == 200
    assert server.state() == "serving"
    assert server.infer([text_request()])[0].weight_version == second.version


def test_weights_of_a_round_that_was_replaced_are_nobodys(server: RunningServer) -> None:
    first = LearnerRound(server, load_learner(seed=22))
    assert first.begin().status_code == 200
    first.push()
    assert first.load().status_code == 200
    second = LearnerRound(server, load_learner(seed=23))
    assert second.begin().status_code == 200
    assert second.finish(commit=False).json()["state"] == "unproven"


def test_a_load_that_cannot_begin_in_time_leaves_the_old_weights_serving(server: RunningServer) -> None:
    LearnerRound(server, load_learner(seed=24)).run()
    late = LearnerRound(server, load_learner(seed=25))
    assert late.begin(timeout_s=60.0).status_code == 200
    late.push()
    held = server.service.rounds._round
    assert held is not None
    _, release = block_engine(server)
    held.end = server.service.rounds._clock() + 1.0  # only a second is left, and the engine is busy
    reply = late.load()
    release.set()
    assert reply.status_code == 500
    assert "did not load" in reply.json()["detail"]
    assert server.state() == "serving"
    assert server.infer([text_request()])[0].weight_version == late.version - 1


def test_close_communicator_frees_the_port(server: RunningServer) -> None:
    round_ = LearnerRound(server, load_learner())
    assert round_.begin().status_code == 200
    round_.connect()
    before = {thread.name for thread in threading.enumerate()}
    assert "weight-receiver" in before
    assert server.post(rollout_protocol.CLOSE_COMMUNICATOR).status_code == 200
    assert "weight-receiver" not in {thread.name for thread in threading.enumerate()}
    assert round_.load().status_code == 500
