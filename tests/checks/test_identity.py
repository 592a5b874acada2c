"""Who answers on a server's port, by the probe of a start, and whether with the learner's model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import config_of, servers_at
from fake_rollout_server import Answer, Behaviour, Call, FakeRolloutServer, error, json_answer

from swift_stage2 import wire
from swift_stage2.channel_b import detection as detection  # registers the task
from swift_stage2.checks import live_servers, servers
from swift_stage2.checks.checks import CheckResult, Verdict
from swift_stage2.checks.doctor import CheckRun
from swift_stage2.checks.live_servers import check_identity
from swift_stage2.wire import ServerInfo

CORRECT = "end what listens there, or correct rollout.servers"


def answers(body: object, status: int = 200) -> Behaviour:
    return lambda call: json_answer(body, status=status)


def stock(call: Call) -> Answer:
    bodies = {wire.WORLD_SIZE: b'{"world_size": 2}', wire.HEALTH: b'{"status": "ok"}'}
    return Answer(body=bodies[call.path]) if call.path in bodies else Answer(status=404)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as running:
        yield running


Look = Callable[..., CheckResult]


@pytest.fixture
def identify(server: FakeRolloutServer, monkeypatch: pytest.MonkeyPatch) -> Look:
    """The doctor's row; keywords change section ``rollout``."""
    monkeypatch.setattr(servers, "vllm_is_installed", lambda: True)

    def ask(**rollout: Any) -> CheckResult:
        changes = {f"rollout.{key}": value for key, value in {"request_timeout_s": 5.0, **rollout}.items()}
        config = config_of(servers_at(server.url), changes)
        return CheckRun().check("who answers", lambda: check_identity(server.url, config))

    return ask


OURS = ServerInfo(False, incarnation="i", engine="transformers", model="/m", state="serving")


def test_every_kind_of_server_is_known_by_what_it_answers(server: FakeRolloutServer, identify: Look) -> None:
    plain = {"/v1/models": {"data": [{"id": "tiny"}]}, "/weight_info": {"weight_version": "default"}}
    for said, told in (
        (stock, "stock swift rollout, answered"),
        (
            answers(replace(OURS, weight_version=3, run_id="r").to_json()),
            "swift-stage2 rollout (transformers), serving, weights: version 3 of run r",
        ),
        (
            lambda call: json_answer(plain[call.path]) if call.path in plain else Answer(status=404),
            "vllm serve, asked for tiny",
        ),
    ):
        server.on_get = said
        found = identify()
        assert (found.verdict, told in found.found) == (Verdict.OK, True), found


@pytest.mark.parametrize(
    ("behaviour", "found", "fix"),
    [
        (lambda call: Answer(status=404), "status 404", CORRECT),
        (lambda call: Answer(body=b"<html>a web page</html>"), "not JSON", CORRECT),
        (lambda call: error(500), "status 500", "read the server's log"),
        (lambda call: Answer(drop=True), "RemoteProtocolError", "read the server's log"),
        (answers({"incarnation": "i", "state": "loading"}), "state=loading", "wait if it is loading"),
        (
            answers({"incarnation": "i", "state": "installing"}),
            "another run has it install weights",
            "end that run",
        ),
    ],
    ids=["404", "html", "500", "dropped", "loading", "installing"],
)
def test_what_is_no_usable_server_fails_with_its_fix(
    server: FakeRolloutServer, identify: Look, behaviour: Behaviour, found: str, fix: str
) -> None:
    server.on_get = behaviour
    row = identify()
    assert row.verdict is Verdict.FAILED
    assert found in row.found
    assert fix in row.fix


@pytest.mark.parametrize("silent", ["everything", "all but health"])
def test_a_server_that_takes_connections_and_answers_late_fails(
    server: FakeRolloutServer, identify: Look, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr(live_servers, "_LOOK_TIMEOUT_S", 0.2)
    never = threading.Event()
    is_up = silent != "everything"
    server.on_get = lambda call: Answer(
        status=404, after=None if is_up and call.path == wire.HEALTH else never
    )
    try:
        row = identify(request_timeout_s=0.3 if is_up else 240.0)
    finally:
        never.set()
    assert row.verdict is Verdict.FAILED
    assert server.url in row.found
    assert "no whole answer in time" in row.found
    if not is_up:
        assert [call.path for call in server.calls] == [wire.HEALTH], "nothing else is waited for"


def test_a_refused_key_is_told_without_the_key(
    server: FakeRolloutServer, identify: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, key, told in (
        (401, "", "holds no key"),
        (403, "wrong", "holds another key than the server's"),
    ):
        monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", key)
        server.on_get = lambda call, status=status: error(status, "Unauthorized")
        row = identify()
        assert (row.verdict, told in row.found) == (Verdict.FAILED, True)
        assert row.fix == "export SWIFT_ROLLOUT_API_KEY=<the key that the server was started with>"
