"""Rounds that end while their weights are on the way into the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, load_learner, text_request
from test_infer import block_engine
from waiting import wait_for


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
