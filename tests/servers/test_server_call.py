"""One call to a server, byte by byte over a real socket: a good answer, or a server's fault that names the path."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

import pytest
from free_port import free_port
from hostile_server import HostileServer

from swift_stage2 import wire
from swift_stage2.errors import ConfigError, FaultKind, ServerFault
from swift_stage2.servers.session import Deadline, ServerHttp, ServerSession, run

KEY = "sk-very-secret-0123456789"
AMPLE_S = 60.0
SHORT_S = 0.3
LIMIT = 1 << 16
MIB = 1 << 20
OK = b"HTTP/1.1 200 OK"


def raw(status_line: bytes, *headers: bytes, body: bytes = b"{}") -> bytes:
    """An answer that ends with its connection."""
    return b"\r\n".join([status_line, *headers, b"", body])


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer(lambda path: [raw(OK)]) as server:
        yield server


@pytest.fixture
def caller(server: HostileServer) -> ServerHttp:
    return ServerHttp(server.url, api_key=KEY)


def ask(caller: ServerHttp, timeout_s: float = AMPLE_S) -> Any:
    return run(caller.ask("GET", "/x/", timeout_s=timeout_s, most_bytes=LIMIT))


def fault_of(caller: ServerHttp, timeout_s: float = AMPLE_S) -> ServerFault:
    with pytest.raises(ServerFault) as caught:
        ask(caller, timeout_s)
    assert str(caught.value).startswith(f"{caller.base_url}/x/: ")
    return caught.value


def test_a_post_carries_body_and_key(server: HostileServer) -> None:
    with ServerSession(server.url, KEY) as session:
        assert session.post(wire.WEIGHTS, {"a": [1]}, Deadline(AMPLE_S)) == {}
    (head,) = server.calls
    assert head.startswith(f"POST {wire.WEIGHTS} HTTP/1.1\r\n".encode())
    assert f"authorization: bearer {KEY}".encode() in head.lower()
    assert b"content-length: 10" in head.lower()


def test_info_of_our_own_server(server: HostileServer) -> None:
    info = wire.ServerInfo(False, "one", "vllm", "m", weight_version=3, run_id="run", state="ready")
    server.answer = lambda path: [raw(OK, body=json.dumps(info.to_json()).encode())]
    with ServerSession(server.url) as session:
        assert session.info(Deadline(AMPLE_S)) == info


def test_proxies_of_the_environment_are_ignored(caller: ServerHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask(caller) == {}


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (raw(b"HTTP/1.1 500 X", body=b"broken engine"), FaultKind.STATUS, "status 500: broken engine"),
        (raw(OK, body=b"<html>"), FaultKind.UNUSABLE, "the reply is not JSON: '<html>'"),
        (raw(OK, body=b""), FaultKind.UNUSABLE, "the reply is not JSON"),
        (b"", FaultKind.LOST, "RemoteProtocolError"),
        (raw(OK, b"Content-Length: 20"), FaultKind.LOST, "RemoteProtocolError"),
        (raw(OK, body=b" " * (LIMIT + 1)), FaultKind.UNUSABLE, f"at most {LIMIT} bytes"),
        (raw(OK, b"Content-Encoding: gzip"), FaultKind.UNUSABLE, "content_encoding='gzip'"),
        (raw(OK, body="{}".encode("utf-16")), FaultKind.UNUSABLE, "is not JSON"),
        (raw(OK, body=b'"\\ud800"'), FaultKind.UNUSABLE, "is not JSON"),
        (raw(OK, body=b"[" * 5000 + b"]" * 5000), FaultKind.UNUSABLE, "recursion limit exceeded"),
        (raw(OK, body=b"1" + b"0" * 5000), FaultKind.UNUSABLE, "number out of range"),
        (raw(OK, body=b"NaN"), FaultKind.UNUSABLE, "is not JSON"),
    ],
    ids=lambda value: ascii(value[:40]) if isinstance(value, bytes) else "",
)
def test_what_no_sound_server_sends_is_its_fault(
    server: HostileServer, caller: ServerHttp, said: bytes, kind: FaultKind, message: str
) -> None:
    server.answer = lambda path: [said]
    fault = fault_of(caller)
    assert fault.kind is kind
    assert message in str(fault)


ODD_LENGTHS = (b"-1", b"one", b"99999999999999999999", b"3\r\nContent-Length: 4")
ODD_HEADERS = (b"no colon at all", b" folded", b": no name", b"X-Null: \x00", b"X-Long: " + b"a" * 200_000)
ODD_CHARSETS = (b"utf-16", b"idna", b"hex", b"rot13", b"x" * 300, b"\xff")
ODD_BODIES = (b"\xff", b"\xa0", b'{"a":' * 900 + b"1" + b"}" * 900, b"{}{}")
ODD_ANSWERS = [
    *(b"\x00\xff", OK, b"\r\n\r\n", raw(b"ICY 200 OK"), raw(b"HTTP/2 200 OK"), raw(b"HTTP/1.1 2OO OK")),
    *(raw(b"HTTP/1.1 %d X" % status) for status in (100, 101, 199, 204, 206, 304, 418, 599, 600, 999)),
    *(raw(OK, b"Content-Length: " + length) for length in ODD_LENGTHS),
    *(
        raw(OK, b"Transfer-Encoding: chunked", body=body)
        for body in (b"{}", b"2\r\n{}\r\n0\r\n", b"-2\r\n{}")
    ),
    *(raw(OK, b"Transfer-Encoding: " + coding) for coding in (b"gzip", b"gzip, chunked")),
    *(raw(OK, b"Content-Encoding: " + coding) for coding in (b"zstd", b"\xff\xfe", b"gzip, gzip")),
    *(raw(OK, header) for header in ODD_HEADERS),
    *(raw(OK, b"Content-Type: text/plain; charset=" + name) for name in ODD_CHARSETS),
    raw(OK, b"Connection: upgrade", b"Upgrade: h2c"),
    *(raw(OK, body=body) for body in ODD_BODIES),
]


def test_whatever_bytes_come_are_a_record_or_the_servers_fault(
    server: HostileServer, caller: ServerHttp
) -> None:
    for said in ODD_ANSWERS:
        server.answer = lambda path, said=said: [said]
        with suppress(ServerFault):
            assert isinstance(ask(caller), dict), said[:60]


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


def test_nobody_listens() -> None:
    fault = fault_of(ServerHttp(f"http://127.0.0.1:{free_port()}", api_key=None))
    assert fault.kind is FaultKind.UNREACHABLE
    assert "ConnectError" in str(fault)


def test_a_resolver_that_hangs_ends_no_later_than_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: opened.wait(AMPLE_S))
    began_s = time.monotonic()
    fault = fault_of(ServerHttp("http://a.name:1", api_key=None), SHORT_S)
    assert fault.kind is FaultKind.UNREACHABLE
    assert time.monotonic() - began_s < AMPLE_S / 2
    opened.set()


def test_a_cookie_is_neither_kept_nor_sent(server: HostileServer, caller: ServerHttp) -> None:
    server.answer = lambda path: [raw(OK, b"Set-Cookie: session=1; Path=/")]
    ask(caller)
    ask(caller)
    assert len(server.calls) == 2
    assert not any(b"cookie" in head.lower() for head in server.calls)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(server: HostileServer, caller: ServerHttp, status: int) -> None:
    with HostileServer(lambda path: [raw(OK)]) as other:
        location = f"Location: {other.url}/x/".encode()
        server.answer = lambda path: [raw(b"HTTP/1.1 %d X" % status, location)]
        assert fault_of(caller).status == status
        assert other.calls == []


@pytest.mark.parametrize("status_line", [b"HTTP/1.1 401 X", OK])
def test_the_key_never_stands_in_an_error(
    server: HostileServer, caller: ServerHttp, status_line: bytes
) -> None:
    """A server may quote the header that it refuses."""
    server.answer = lambda path: [raw(status_line, body=b"Bearer " + KEY.encode() + b" is bad")]
    text = str(fault_of(caller))
    assert KEY not in text
    assert "Bearer ***" in text


@pytest.mark.parametrize("key", ["line\nbreak", "two words", "schlüssel", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"check rollout\.api_key_env") as caught:
        ServerSession("http://127.0.0.1:1", key)
    assert key not in str(caught.value)


def test_a_server_that_was_ours_is_no_stock_one_for_an_answer_of_404(server: HostileServer) -> None:
    server.answer = lambda path: [raw(b"HTTP/1.1 404 X", body=b"")]
    with ServerSession(server.url) as session:
        assert session.info(Deadline(AMPLE_S)).stock
    with (
        ServerSession(server.url, must_be_ours=True) as session,
        pytest.raises(ServerFault, match="was ours in this run must stay ours"),
    ):
        session.info(Deadline(AMPLE_S))
