"""Calls that wait for completions keep nobody else waiting, and end with their callers."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import CALL_TIMEOUT_S, LearnerRound, RunningServer, load_learner, text_request
from test_infer import block_engine, wait_until_queued
from waiting import wait_for

from swift_stage2.rollout_server.routes import _CONTROL_THREADS
from swift_stage2.servers import protocol


def call_and_wait(server: RunningServer) -> socket.socket:
    host, port = server.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=CALL_TIMEOUT_S)
    head = f"POST {protocol.RESET_PREFIX_CACHE} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    connection.sendall(head.encode() + b"{}")
    return connection


def test_resets_that_wait_hold_up_no_round_and_end_with_their_callers(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[threading.Event] = []
    ended: list[bool] = []
    reset_cache = server.engine.reset_cache

    def noted(kind: Any, timeout_s: float, given_up: threading.Event) -> bool:
        waiting.append(given_up)
        ended.append(reset_cache(kind, timeout_s, given_up))
        return ended[-1]

    monkeypatch.setattr(server.engine, "reset_cache", noted)
    _, release = block_engine(server)
    with ThreadPoolExecutor(1) as caller:
        try:
            rollout = caller.submit(server.infer, [text_request()])
            wait_until_queued(server, 1)
            callers = [call_and_wait(server) for _ in range(_CONTROL_THREADS)]
            wait_for(lambda: len(waiting) == _CONTROL_THREADS)
            assert LearnerRound(server, load_learner()).begin().status_code == 409  # at once: a rollout runs
            assert not ended
            for connection in callers:
                connection.close()
            wait_for(lambda: ended == [False] * _CONTROL_THREADS)
            assert not rollout.done()
        finally:
            release.set()
        rollout.result(CALL_TIMEOUT_S)
    assert protocol.parse_cache_reset(server.post(protocol.RESET_PREFIX_CACHE).json())
