"""Bodies that wait to be decoded: small and control calls pass large ones, and nobody's body is not decoded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest
from live_server import CALL_TIMEOUT_S, GREEDY, LearnerRound, RunningServer, load_learner, serve, text_request
from test_control_calls import call_and_wait, status_of
from waiting import wait_for

from swift_stage2.rollout_server import routes
from swift_stage2.servers import protocol
from swift_stage2.servers.request_checks import RequestLimits


def infer_body(text: str = "large", num_bytes: int = 3 * 2**19) -> bytes:
    """White space makes it large and costs the decoder nothing."""
    body = {"infer_requests": [text_request(text)], "request_config": GREEDY}
    return json.dumps(body).encode() + b" " * num_bytes


class Decoding:
    """``/infer/`` bodies as they are decoded; those that say ``held`` stay there until ``go_on``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def decode(self, body: Any, limits: RequestLimits) -> Any:
        text = body["infer_requests"][0]["messages"][0]["content"]
        self.begun.append(text)
        if text == "held":
            assert self.go_on.wait(CALL_TIMEOUT_S)
        return InferCall(body, limits)


InferCall = routes.InferCall


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    held = Decoding()
    monkeypatch.setattr(routes, "InferCall", held.decode)
    yield held
    held.go_on.set()


@contextmanager
def large_bodies_held(server: RunningServer, decoding: Decoding) -> Iterator[list[socket.socket]]:
    """As many as there are threads for them; all are answered at the end."""
    with ExitStack() as stack:
        callers = [
            stack.enter_context(closing(call_and_wait(server, protocol.INFER, infer_body("held"))))
            for _ in range(2)
        ]
        wait_for(lambda: len(decoding.begun) == len(callers))
        yield callers
        decoding.go_on.set()
        assert [status_of(caller) for caller in callers] == [200] * len(callers)


def abort(server: RunningServer) -> int:
    stamp = server.engine.stamp
    reply = server.post(protocol.ABORT, protocol.AbortRequest(stamp.run_id, stamp.version).to_json())
    return int(reply.json()["aborted"])


def test_an_abort_meets_what_arrived_before_it_and_is_decoded_after_it(
    server: RunningServer, decoding: Decoding
) -> None:
    LearnerRound(server, load_learner()).run()  # aborts name the weights
    with ThreadPoolExecutor(1) as caller:
        rollout = caller.submit(server.infer, [text_request("held")])
        wait_for(lambda: decoding.begun == ["held"])
        assert abort(server) == 0  # nothing that runs
        decoding.go_on.set()
        (completion,) = rollout.result(CALL_TIMEOUT_S)
    assert completion.finish_reason == "abort"


def test_bodies_beyond_the_room_for_them_are_refused_with_429(loaded_engine: Any, decoding: Decoding) -> None:
    limits = RequestLimits(max_body_mib=2)  # in all 8 MiB
    with serve(loaded_engine, limits=limits) as server, ThreadPoolExecutor(4) as callers:

        def ask() -> httpx.Response:
            return server.http.post(protocol.INFER, content=infer_body())

        with large_bodies_held(server, decoding):
            asked = [callers.submit(ask) for _ in range(4)]
            # One of them, while the others wait
            refused = next(as_completed(asked, CALL_TIMEOUT_S)).result(0)
            assert refused.status_code == 429
            assert "ask again later" in refused.json()["detail"]
            assert server.infer([text_request("small")])
        assert {each.result(CALL_TIMEOUT_S).status_code for each in asked} == {200, 429}
        assert ask().status_code == 200  # there is room again
