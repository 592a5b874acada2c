"""Control calls against a real HTTP server that misbehaves: every fault is a ServerFault that names the path."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fake_rollout_server import Answer, Call, FakeRolloutServer

from swift_stage2 import wire
from swift_stage2.errors import ConfigError, ServerFault
from swift_stage2.servers.session import Deadline, ServerSession

KEY = "sk-very-secret-0123456789"
AMPLE_S = 60.0
SHORT_S = 0.2
INFO = wire.ServerInfo(
    stock=False,
    incarnation="one",
    engine="transformers",
    weight_version=3,
    run_id="run",
    state="ready",
    manifest=(wire.TensorSpec("w", (2, 3), "float32"),),
)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as server:
        yield server


@pytest.fixture
def session(server: FakeRolloutServer) -> Iterator[ServerSession]:
    with ServerSession(server.url, KEY) as session:
        yield session


def _says(body: Any, **answer: Any) -> Callable[[Call], Answer]:
    return lambda call: Answer(body=json.dumps(body).encode(), **answer)


def _calls(session: ServerSession, deadline_s: float = AMPLE_S) -> list[Callable[[], Any]]:
    """The three kinds of call."""
    return [
        lambda: session.info(Deadline(deadline_s)),
        lambda: session.get(wire.WORLD_SIZE, Deadline(deadline_s)),
        lambda: session.post(wire.WEIGHTS, {"a": 1}, Deadline(deadline_s)),
    ]


def _set(server: FakeRolloutServer, behaviour: Callable[[Call], Answer]) -> None:
    server.on_get = server.on_reset = behaviour


# --- good answers ------------------------------------------------------------------------------------


def test_info_of_our_own_server(server: FakeRolloutServer, session: ServerSession) -> None:
    server.on_get = _says(INFO.to_json())
    assert session.info(Deadline(AMPLE_S)) == INFO
    assert [call.path for call in server.calls] == [wire.SERVER_INFO]


def test_a_post_carries_body_and_key(server: FakeRolloutServer, session: ServerSession) -> None:
    server.on_reset = _says({"fine": True})
    assert session.post(wire.WEIGHTS, {"a": [1]}, Deadline(AMPLE_S)) == {"fine": True}
    (call,) = server.calls
    assert (call.path, call.body) == (wire.WEIGHTS, {"a": [1]})
    assert call.headers["Authorization"] == f"Bearer {KEY}"


def test_proxies_of_the_environment_are_ignored(
    server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on_get = _says({})
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ServerSession(server.url) as session:
        assert session.get(wire.WORLD_SIZE, Deadline(AMPLE_S)) == {}


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (lambda call: Answer(status=500, body=b"broken engine"), "status 500: broken engine"),
        (lambda call: Answer(status=409, body=b"busy"), "status 409: busy"),
        (lambda call: Answer(body=b"<html>"), "the reply is not JSON: '<html>'"),
        (lambda call: Answer(body=b""), "the reply is not JSON"),
        (lambda call: Answer(drop=True), "RemoteProtocolError"),
        (_says({"long": "x" * 500}, cut_after_bytes=20), "RemoteProtocolError"),
    ],
    ids=["500", "409", "html", "empty", "dropped", "cut"],
)
def test_whatever_is_wrong_with_a_reply_is_the_servers_fault(
    server: FakeRolloutServer, session: ServerSession, behaviour: Callable[[Call], Answer], message: str
) -> None:
    _set(server, behaviour)
    paths = (wire.SERVER_INFO, wire.WORLD_SIZE, wire.WEIGHTS)
    for call, path in zip(_calls(session), paths, strict=True):
        with pytest.raises(ServerFault) as caught:
            call()
        assert str(caught.value).startswith(f"{server.url}{path}: ")
        assert message in str(caught.value)


def test_nobody_listens() -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with ServerSession(url) as session:
        for call in _calls(session):
            with pytest.raises(ServerFault, match="ConnectError"):
                call()


def test_a_server_that_never_answers_is_left_at_the_deadline(
    server: FakeRolloutServer, session: ServerSession, forever: threading.Event
) -> None:
    _set(server, lambda call: Answer(after=forever))
    for call in _calls(session, SHORT_S):
        with pytest.raises(ServerFault, match="no whole answer in time, got timeout_s="):
            call()


# --- the key -----------------------------------------------------------------------------------------


def test_the_key_never_stands_in_an_error(server: FakeRolloutServer, session: ServerSession) -> None:
    """A server may quote the header that it refuses."""
    echoes = [
        lambda call: Answer(status=401, body=f"bad header: {call.headers['Authorization']}".encode()),
        lambda call: Answer(body=f"who is {call.headers['Authorization']}?".encode()),
    ]
    for behaviour in echoes:
        _set(server, behaviour)
        for call in _calls(session):
            with pytest.raises(ServerFault) as caught:
                call()
            assert KEY not in str(caught.value)
            assert "Bearer ***" in str(caught.value)


@pytest.mark.parametrize("key", ["line\nbreak", "two words", "schlüssel", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"check rollout\.api_key_env") as caught:
        ServerSession("http://127.0.0.1:1", key)
    assert key not in str(caught.value)


# --- deadlines ---------------------------------------------------------------------------------------
