"""Control calls that wait: they fill no threads, end with their callers, and nothing is done behind a caller's back."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, load_learner
from waiting import wait_for

from swift_stage2.rollout_server.routes import _CONTROL_THREADS
from swift_stage2.servers import protocol

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
            stack.enter_context(closing(call_and_wait(server, protocol.PROCESS_WEIGHTS))) for _ in range(MANY)
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
    load = call_and_wait(server, protocol.PROCESS_WEIGHTS)
    wait_for(lambda: server.service.rounds._round is not None and server.service.rounds._round.is_loading)
    load.close()
    wait_for(lambda: server.state() == "serving")
    assert server.engine.stamp == before
    half_pushed.close()


@contextmanager
def all_control_threads_busy(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Aborts that the engine does not answer before the context ends."""
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hold(jobs: Any) -> int:
        entered.release()
        assert go_on.wait(CALL_TIMEOUT_S)
        return 0

    stamp = server.engine.stamp
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(server.engine, "abort", hold)
        body = f'{{"run_id": "{stamp.run_id}", "version": {stamp.version}}}'.encode()
        for _ in range(_CONTROL_THREADS):
            stack.enter_context(closing(call_and_wait(server, protocol.ABORT, body)))
        for _ in range(_CONTROL_THREADS):
            assert entered.acquire(timeout=CALL_TIMEOUT_S)
        try:
            yield
        finally:
            go_on.set()


def test_a_call_whose_caller_left_before_its_turn_is_never_begun(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    LearnerRound(server, load_learner(seed=32)).run()  # aborts name the weights
    begun: list[str] = []
    begin = server.service.rounds.begin

    def noted(request: protocol.RoundRequest) -> None:
        begun.append(request.round_id)
        begin(request)

    monkeypatch.setattr(server.service.rounds, "begin", noted)
    with all_control_threads_busy(server, monkeypatch):
        manifest = LearnerRound(server, load_learner()).export.manifest()
        leaver = protocol.RoundRequest("behind my back", "run-1", 1, manifest)
        with closing(
            call_and_wait(server, protocol.BEGIN_ROUND, json.dumps(leaver.to_json()).encode())
        ) as connection:
            assert server.state() == "serving"  # the call has been read, and waits for its turn
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""  # the server has noticed
            for _ in range(10):  # each gives the event loop, which has noticed, some turns to tell the call
                assert server.state() == "serving"
    last = LearnerRound(server, load_learner(seed=33))
    last.run()
    assert begun == [last.round_id]
    assert server.state() == "serving"
