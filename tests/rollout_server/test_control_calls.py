"""Calls that wait: they fill no threads, end with their callers, pass large bodies, and none is forgotten."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
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
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server import routes
from swift_stage2.rollout_server.routes import _CONTROL_THREADS
from swift_stage2.servers.request_checks import RequestLimits

MANY = 2 * _CONTROL_THREADS + 2
pytestmark = pytest.mark.usefixtures("checkpoints_weights_again")


def call_and_wait(server: RunningServer, path: str, body: bytes = b"{}") -> socket.socket:
    host, port = server.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=CALL_TIMEOUT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(12).split()[1])


@pytest.fixture
def half_pushed(server: RunningServer) -> LearnerRound:
    """An offer whose learner has connected and sends nothing."""
    round_ = LearnerRound(server, load_learner(seed=30))
    round_.connect(timeout_s=300.0)
    return round_


def ask_to_install(round_: LearnerRound) -> socket.socket:
    return call_and_wait(round_.server, wire.INSTALL, json.dumps(round_.installation).encode())


def test_one_install_waits_all_others_are_refused_at_once_and_a_newer_offer_ends_it(
    server: RunningServer, half_pushed: LearnerRound
) -> None:
    with ExitStack() as stack:
        installs = [stack.enter_context(closing(ask_to_install(half_pushed))) for _ in range(MANY)]
        wait_for(lambda: server.service.slot._installing is not None)
        next_round = LearnerRound(server, load_learner(seed=31))
        next_round.run()
        assert sorted(status_of(each) for each in installs) == [409] * (MANY - 1) + [500]
    assert server.infer([text_request()])[0].weight_version == next_round.version
    half_pushed.close()


def test_an_install_whose_caller_has_gone_ends_and_installs_nothing(
    server: RunningServer, half_pushed: LearnerRound
) -> None:
    before = server.engine.stamp
    install = ask_to_install(half_pushed)
    wait_for(lambda: server.service.slot._installing is not None)
    install.close()
    wait_for(lambda: server.service.slot._installing is None)
    assert (server.state(), server.engine.stamp) == ("serving", before)
    half_pushed.close()


def infer_body(text: str = "large", num_bytes: int = 3 * 2**19) -> bytes:
    """White space makes it large and costs the decoder nothing."""
    body = {"infer_requests": [text_request(text)], "request_config": GREEDY}
    return json.dumps(body).encode() + b" " * num_bytes


class Decoding:
    """``/infer/`` bodies as they are decoded; those that say ``held`` stay there until ``go_on``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def check(self, raw: bytes, limits: RequestLimits) -> Any:
        text = json.loads(raw)["infer_requests"][0]["messages"][0]["content"]
        self.begun.append(text)
        if text == "held":
            assert self.go_on.wait(CALL_TIMEOUT_S)
        return check_call(raw, limits)


check_call = routes.check_call


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    held = Decoding()
    monkeypatch.setattr(routes, "check_call", held.check)
    yield held
    held.go_on.set()


def test_bodies_beyond_the_room_for_them_are_refused_with_429(loaded_engine: Any, decoding: Decoding) -> None:
    limits = RequestLimits(max_body_mib=2)  # in all 8 MiB
    with serve(loaded_engine, limits=limits) as server:

        def ask() -> httpx.Response:
            return server.http.post(wire.INFER, content=infer_body())

        with ExitStack() as stack:
            callers = [
                stack.enter_context(closing(call_and_wait(server, wire.INFER, infer_body("held"))))
                for _ in range(5)
            ]
            wait_for(lambda: len(decoding.begun) == len(callers))
            refused = ask()
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert server.infer([text_request("small")])
            decoding.go_on.set()
            assert [status_of(caller) for caller in callers] == [200] * len(callers)
        assert ask().status_code == 200  # there is room again
