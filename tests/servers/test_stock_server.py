"""A stock server is one that answers as ``swift rollout`` does; 404 alone makes none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_rollout_server import Answer, Behaviour, FakeRolloutServer

from swift_stage2 import wire
from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.servers.stock import ask_world_size


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as running:
        yield running


def world_size(body: bytes, status: int = 200) -> Behaviour:
    return lambda call: Answer(status, body) if call.path == wire.WORLD_SIZE else Answer(404)


def test_a_stock_server_tells_its_workers(server: FakeRolloutServer) -> None:
    server.on_get = world_size(b'{"world_size": 2}')
    with ServerSession(server.url) as session:
        assert ask_world_size(session, Deadline(5.0)) == 2


@pytest.mark.parametrize(
    ("behaviour", "foreign"),
    [
        (world_size(b"<html>", 404), True),
        (world_size(b"<html>welcome</html>"), True),
        (world_size(b'{"world_size": true}'), True),
        (world_size(b'{"world_size": 0}'), True),
        (world_size(b'{"world_size": 1000000000000}'), True),
        (world_size(b'["world_size"]'), True),
        (world_size(b"{}"), True),
        (world_size(b"loading", 503), False),
        (world_size(b"no key", 401), False),
        (lambda call: Answer(drop=True), False),
    ],
    ids=["404", "html", "boolean", "none", "huge", "list", "empty", "503", "401", "dropped"],
)
def test_what_answers_otherwise_is_no_stock_server(
    server: FakeRolloutServer, behaviour: Behaviour, foreign: bool
) -> None:
    server.on_get = behaviour
    with ServerSession(server.url) as session, pytest.raises(ServerFault) as caught:
        ask_world_size(session, Deadline(5.0))
    assert caught.value.is_foreign is foreign
