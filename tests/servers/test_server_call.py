"""One call to a server, byte by byte over a real socket: sizes, encodings, cookies, redirects, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import pytest
from hostile_server import HostileServer

from swift_stage2.errors import FaultKind, ServerFault
from swift_stage2.servers.session import Deadline, ServerHttp, ServerSession, run

AMPLE_S = 60.0
SHORT_S = 0.3
LIMIT = 1 << 16
MIB = 1 << 20


def answer(body: bytes, *headers: str, status: int = 200) -> Callable[[str], Iterable[bytes]]:
    head = "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""])
    return lambda path: [head.encode("latin-1") + body]


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer(answer(b"{}")) as server:
        yield server


@pytest.fixture
def caller(server: HostileServer) -> ServerHttp:
    return ServerHttp(server.url, api_key=None)


def ask(caller: ServerHttp, timeout_s: float = AMPLE_S) -> Any:
    return run(caller.ask("GET", "/x/", timeout_s=timeout_s, most_bytes=LIMIT))


def fault_of(caller: ServerHttp, timeout_s: float = AMPLE_S) -> ServerFault:
    with pytest.raises(ServerFault) as caught:
        ask(caller, timeout_s)
    return caught.value


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b" " * (LIMIT + 1), [], f"at most {LIMIT} bytes"),
        (b"{}", ["Content-Encoding: gzip"], "content_encoding='gzip'"),
        (b"{}", ["Content-Encoding: br"], "content_encoding='br'"),
        ("{}".encode("utf-16"), ["Content-Type: application/json; charset=utf-16"], "is not JSON"),
        (b'"\\ud800"', [], "is not JSON"),
        (b"[" * 5000 + b"]" * 5000, [], "recursion limit exceeded"),
        (b"1" + b"0" * 5000, [], "number out of range"),
        (b"NaN", [], "is not JSON"),
    ],
)
def test_what_no_sound_server_sends_is_its_fault(
    server: HostileServer, caller: ServerHttp, body: bytes, headers: list[str], message: str
) -> None:
    server.answer = answer(body, *headers)
    fault = fault_of(caller)
    assert fault.kind is FaultKind.UNUSABLE
    assert message in str(fault)


def test_nothing_is_read_past_the_limit(server: HostileServer, caller: ServerHttp) -> None:
    sent: list[int] = []

    def endless(path: str) -> Iterable[bytes]:
        yield b"HTTP/1.1 200 X\r\n\r\n"
        for piece in repeat(b" " * MIB):
            sent.append(len(piece))
            yield piece

    server.answer = endless
    assert fault_of(caller).kind is FaultKind.UNUSABLE
    # What the sockets between them hold may have left the server as well.
    assert sum(sent) < 64 * MIB


@pytest.mark.parametrize("piece", [b" ", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["body", "interim"])
def test_a_call_ends_at_its_deadline_however_often_something_arrives(
    server: HostileServer, caller: ServerHttp, piece: bytes
) -> None:
    def trickle(path: str) -> Iterable[bytes]:
        yield b"HTTP/1.1 200 X\r\nContent-Length: 60000\r\n\r\n" if piece == b" " else b""
        while not server._ending.wait(0.02):
            yield piece

    server.answer = trickle
    fault = fault_of(caller, SHORT_S)
    assert fault.kind is FaultKind.LATE
    assert f"no whole answer in time, got timeout_s={SHORT_S:.3f}" in str(fault)


def test_a_resolver_that_hangs_ends_no_later_than_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: opened.wait(AMPLE_S))
    began_s = time.monotonic()
    fault = fault_of(ServerHttp("http://a.name:1", api_key=None), SHORT_S)
    assert fault.kind is FaultKind.UNREACHABLE
    assert time.monotonic() - began_s < AMPLE_S / 2
    opened.set()


def test_a_cookie_is_neither_kept_nor_sent(server: HostileServer, caller: ServerHttp) -> None:
    server.answer = answer(b"{}", "Set-Cookie: session=1; Path=/")
    ask(caller)
    ask(caller)
    assert len(server.calls) == 2
    assert not any(b"cookie" in head.lower() for head in server.calls)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(server: HostileServer, status: int) -> None:
    with HostileServer(answer(b"{}")) as other:
        server.answer = answer(b"", f"Location: {other.url}/x/", status=status)
        assert fault_of(ServerHttp(server.url, api_key="sk-key")).status == status
        assert other.calls == []


def test_a_server_that_was_ours_is_no_stock_one_for_an_answer_of_404(server: HostileServer) -> None:
    server.answer = answer(b"", status=404)
    with ServerSession(server.url) as session:
        assert session.info(Deadline(AMPLE_S)).stock
    with (
        ServerSession(server.url, must_be_ours=True) as session,
        pytest.raises(ServerFault, match="was ours in this run must stay ours"),
    ):
        session.info(Deadline(AMPLE_S))
