"""The fault-injecting proxy against a real HTTP server and a real client."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import httpx
import pytest
from fake_rollout_server import FakeRolloutServer, request
from waiting import wait_for

from benchmarks.faults.proxy import FaultProxy, ReplyFault
from swift_stage2.servers import protocol

_TIMEOUT_S = 60.0
# Closed with a part of the request unread, a connection is reset; with all of it read, it just ends.
_WITHOUT_ANSWER = (httpx.RemoteProtocolError, httpx.NetworkError)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as running:
        yield running


@pytest.fixture
def proxy(server: FakeRolloutServer) -> Iterator[FaultProxy]:
    with FaultProxy(int(server.url.rpartition(":")[2])) as running:
        yield running


def post(
    proxy: FaultProxy, path: str = protocol.INFER, timeout_s: float = _TIMEOUT_S, **headers: str
) -> httpx.Response:
    body = {"infer_requests": [request("x" * 50_000)], "request_config": {"seed": 1}}
    url = f"http://127.0.0.1:{proxy.port}{path}"
    return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=timeout_s)


def test_everything_else_passes_untouched(server: FakeRolloutServer, proxy: FaultProxy) -> None:
    direct = httpx.post(
        server.url + protocol.INFER,
        json={"infer_requests": [request("x" * 50_000)], "request_config": {"seed": 1}},
        trust_env=False,
    )
    reply = post(proxy)
    assert (reply.status_code, reply.content) == (200, direct.content)
    assert server.calls[0].body == server.calls[1].body
    assert post(proxy, protocol.RESET_PREFIX_CACHE).json()["message"].endswith("status: True")
    assert httpx.get(f"http://127.0.0.1:{proxy.port}/nothing/", trust_env=False).status_code == 404


def test_one_reply_is_cut_and_the_next_is_whole(proxy: FaultProxy) -> None:
    proxy.commit_next(ReplyFault.CUT)
    with pytest.raises(httpx.RemoteProtocolError):
        post(proxy)
    assert post(proxy).status_code == 200
    (committed,) = proxy.committed
    assert committed.fault is ReplyFault.CUT


def test_a_delayed_reply_is_kept_until_the_caller_has_gone(proxy: FaultProxy) -> None:
    proxy.commit_next(ReplyFault.DELAY)
    with pytest.raises(httpx.ReadTimeout):
        post(proxy, timeout_s=0.3)
    wait_for(lambda: bool(proxy.committed))
    assert proxy.committed[0].caller_left
    assert post(proxy).status_code == 200


def test_a_rollout_is_answered_500_without_the_server(server: FakeRolloutServer, proxy: FaultProxy) -> None:
    for _ in range(2):
        proxy.commit_next(ReplyFault.HTTP_500)
    assert post(proxy, protocol.RESET_PREFIX_CACHE).status_code == 200
    for _ in range(2):
        reply = post(proxy)
        assert (reply.status_code, reply.json()) == (500, {"detail": "a fault of the bench"})
    assert not server.infer_calls
    assert post(proxy).status_code == 200
    assert [each.fault for each in proxy.committed] == [ReplyFault.HTTP_500] * 2
    assert len(server.infer_calls) == 1


def test_a_late_reply_comes_after_its_own_delay(proxy: FaultProxy) -> None:
    proxy.commit_next(ReplyFault.DELAY, delay_s=0.3)
    assert post(proxy).status_code == 200
    (committed,) = proxy.committed
    assert not committed.caller_left
    assert committed.at - committed.asked_at >= 0.3


def test_a_fault_falls_on_rollouts_only_and_not_on_a_rounds_own_question(proxy: FaultProxy) -> None:
    proxy.commit_next(ReplyFault.CUT)
    assert post(proxy, protocol.RESET_PREFIX_CACHE).status_code == 200
    assert post(proxy, **{protocol.ROUND_HEADER: "r1"}).status_code == 200
    with pytest.raises(httpx.RemoteProtocolError):
        post(proxy)


def test_the_gate_holds_rollouts_and_lets_everything_else_pass(
    server: FakeRolloutServer, proxy: FaultProxy
) -> None:
    proxy.hold()
    replies: list[int] = []
    caller = threading.Thread(target=lambda: replies.append(post(proxy).status_code), daemon=True)
    caller.start()
    wait_for(lambda: proxy.num_held_rollouts == 1)
    assert post(proxy, protocol.RESET_PREFIX_CACHE).status_code == 200
    assert not server.infer_calls
    proxy.release()
    caller.join(_TIMEOUT_S)
    assert replies == [200]
    assert (proxy.num_held_rollouts, proxy.num_rollouts) == (0, 1)


def test_a_dead_server_looks_dead() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with FaultProxy(unused.getsockname()[1]) as proxy, pytest.raises(_WITHOUT_ANSWER):
            post(proxy)


def test_a_server_that_is_killed_while_it_computes_looks_dead_at_once() -> None:
    """The kernel resets its connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        server = threading.Thread(target=die, daemon=True)
        server.start()
        with FaultProxy(listener.getsockname()[1]) as proxy, pytest.raises(_WITHOUT_ANSWER):
            httpx.get(f"http://127.0.0.1:{proxy.port}/", trust_env=False, timeout=_TIMEOUT_S)
        server.join(_TIMEOUT_S)


def test_the_port_is_free_after_the_end(server: FakeRolloutServer) -> None:
    with FaultProxy(int(server.url.rpartition(":")[2])) as proxy:
        port = proxy.port
        assert post(proxy).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
