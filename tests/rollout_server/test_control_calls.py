"""Control calls that wait: they fill no threads, end with their callers, and nothing is done behind a caller's back."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest
from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, load_learner
from waiting import wait_for

from swift_stage2 import wire
from swift_stage2.rollout_server.routes import _CONTROL_THREADS

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
    """A round whose learner has announced a bucket and sends nothing."""
    round_ = LearnerRound(server, load_learner(seed=30))
    assert round_.begin(timeout_s=300.0).status_code == 200
    round_.connect(timeout_s=300.0)
    assert round_.announce(round_.buckets()[0][1]).status_code == 200
    return round_


def test_one_load_waits_and_all_others_are_refused_at_once(
    server: RunningServer, half_pushed: LearnerRound
) -> None:
    with ExitStack() as stack:
        loads = [
            stack.enter_context(closing(call_and_wait(server, wire.PROCESS_WEIGHTS))) for _ in range(MANY)
        ]
        wait_for(lambda: server.service.rounds._round is not None and server.service.rounds._round.is_loading)
        next_round = LearnerRound(server, load_learner(seed=31))
        assert next_round.begin().status_code == 200  # of the same run: it gives way
        assert sorted(status_of(load) for load in loads) == [409] * (MANY - 1) + [500]
    next_round.push()
    assert next_round.load().status_code == 200
    next_round.close()
    assert next_round.finish().status_code == 200
    half_pushed.close()


def test_a_load_whose_caller_has_gone_ends_and_loads_nothing(
    server: RunningServer, half_pushed: LearnerRound
) -> None:
    before = server.engine.stamp
    load = call_and_wait(server, wire.PROCESS_WEIGHTS)
    wait_for(lambda: server.service.rounds._round is not None and server.service.rounds._round.is_loading)
    load.close()
    wait_for(lambda: server.state() == "serving")
    assert server.engine.stamp == before
    half_pushed.close()
