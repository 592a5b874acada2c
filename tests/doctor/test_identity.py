"""Who answers on the port: wrong and odd servers, each with the exact fix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from fake_rollout_server import Answer, Behaviour, Call, FakeRolloutServer, error, outputs
from fake_rollout_server import output as wire_output

from swift_stage2.config import RolloutConfig, ServerConfig
from swift_stage2.doctor.examination import Outcome, Verdict
from swift_stage2.doctor.server_identity import ServerIdentity, check_identity, check_model
from swift_stage2.servers import protocol
from swift_stage2.servers.protocol import ServerInfo
from swift_stage2.servers.session import ServerSession

KEY = "rollout.servers[0]"
CORRECT = "end what listens there, or correct rollout.servers[0].base_url: it is no rollout server"


def answers(body: object, status: int = 200) -> Behaviour:
    return lambda call: Answer(status=status, body=json.dumps(body).encode())


def stock(call: Call) -> Answer:
    bodies = {protocol.WORLD_SIZE: b'{"world_size": 2}', protocol.HEALTH: b'{"status": "ok"}'}
    return Answer(body=bodies[call.path]) if call.path in bodies else Answer(status=404)


def merged(call: Call) -> Answer:
    health = b'{"status": "ok", "upstream": "http://127.0.0.1:8000"}'
    return Answer(body=health) if call.path == protocol.HEALTH else stock(call)


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer() as running:
        yield running


@pytest.fixture
def identify(server: FakeRolloutServer) -> Callable[[], Outcome[ServerIdentity]]:
    def ask() -> Outcome[ServerIdentity]:
        rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url),), request_timeout_s=5.0)
        with ServerSession(server.url, rollout.api_key()) as session:
            return check_identity(session, rollout, KEY)

    return ask


def test_a_stock_server_is_known_by_what_it_lacks_and_has(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerIdentity]]
) -> None:
    server.on_get = stock
    outcome = identify()
    assert outcome.verdict is Verdict.OK
    assert "stock swift rollout, 2 worker(s)" in outcome.found


def test_a_merger_is_told_with_the_server_behind_it(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerIdentity]]
) -> None:
    server.on_get = merged
    outcome = identify()
    assert outcome.verdict is Verdict.OK
    assert (
        "stock swift rollout at http://127.0.0.1:8000 behind swift-stage2 merge, 2 worker(s)" in outcome.found
    )


def test_our_server_says_what_it_is(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerIdentity]]
) -> None:
    info = ServerInfo(
        False,
        incarnation="i",
        engine="transformers",
        model="/m",
        state="serving",
        weight_version=3,
        run_id="r",
    )
    server.on_get = answers(info.to_json())
    outcome = identify()
    assert outcome.verdict is Verdict.OK
    assert "swift-stage2 rollout (transformers), serving, weights: version 3 of run r" in outcome.found


@pytest.mark.parametrize(
    ("behaviour", "found", "fix"),
    [
        (lambda call: Answer(status=404), "status 404", CORRECT),
        (answers({"hello": "world"}), "incarnation", CORRECT),
        (lambda call: Answer(body=b"<html>a web page</html>"), "not JSON", CORRECT),
        (lambda call: error(500), "status 500", "read the server's log and restart it"),
        (lambda call: Answer(drop=True), "RemoteProtocolError", "read the server's log and restart it"),
        (lambda call: Answer(status=405), "status 405", CORRECT),
        (
            lambda call: (
                Answer(body=b'{"world_size": "two"}')
                if call.path == protocol.WORLD_SIZE
                else Answer(status=404)
            ),
            "no rollout server",
            CORRECT,
        ),
        (
            answers({"incarnation": "i", "state": "loading"}),
            "state=loading",
            "wait until the server has loaded its model",
        ),
        (
            answers({"incarnation": "i", "state": "round_open"}),
            "a sync round of another run is open",
            "end that run",
        ),
    ],
    ids=["404", "other-json", "html", "500", "dropped", "405", "odd-size", "loading", "round-open"],
)
def test_what_is_no_usable_server_fails_with_its_fix(
    server: FakeRolloutServer,
    identify: Callable[[], Outcome[ServerIdentity]],
    behaviour: Behaviour,
    found: str,
    fix: str,
) -> None:
    server.on_get = behaviour
    outcome = identify()
    assert outcome.verdict is Verdict.FAILED
    assert found in outcome.found
    assert fix in outcome.fix


@pytest.mark.parametrize(
    ("key", "told"), [(None, "holds no key"), ("wrong", "holds another key than the server's")]
)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_told_without_the_key(
    server: FakeRolloutServer,
    identify: Callable[[], Outcome[ServerIdentity]],
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    told: str,
    status: int,
) -> None:
    if key:
        monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", key)
    server.on_get = lambda call: error(status, "Unauthorized")
    outcome = identify()
    assert outcome.verdict is Verdict.FAILED
    assert told in outcome.found
    assert outcome.fix == "export SWIFT_ROLLOUT_API_KEY=<the key that the server was started with>"


def test_an_unproven_server_is_a_warning(
    server: FakeRolloutServer, identify: Callable[[], Outcome[ServerIdentity]]
) -> None:
    server.on_get = answers({"incarnation": "i", "state": "unproven"})
    outcome = identify()
    assert outcome.verdict is Verdict.WARNING
    assert outcome.value is not None
    assert outcome.value.is_unproven


# --- the model served --------------------------------------------------------------------------------


def ask_model(server: FakeRolloutServer, expected: str) -> Outcome[ServerIdentity]:
    rollout = RolloutConfig(servers=(ServerConfig(base_url=server.url),), request_timeout_s=5.0)
    with ServerSession(server.url) as session:
        return check_model(session, ServerIdentity(ServerInfo(stock=True)), rollout, expected, KEY)


def named(model: str) -> Behaviour:
    item = wire_output("x")
    item["response"]["model"] = model
    return lambda call: outputs([item])


def test_a_stock_server_names_the_last_part_of_its_models_path(server: FakeRolloutServer) -> None:
    server.on_infer = named("stage1")
    assert ask_model(server, "/models/stage1").verdict is Verdict.OK


def test_another_model_fails_with_the_model_to_start(server: FakeRolloutServer) -> None:
    server.on_infer = named("Qwen2.5-VL-7B")
    outcome = ask_model(server, "/models/stage1")
    assert outcome.verdict is Verdict.FAILED
    assert outcome.found == "serves Qwen2.5-VL-7B, the learner trains /models/stage1"
    assert "--model /models/stage1" in outcome.fix


def test_a_server_that_names_no_model_is_a_warning(server: FakeRolloutServer) -> None:
    outcome = ask_model(server, "/models/stage1")
    assert outcome.verdict is Verdict.WARNING
    assert outcome.fix == "make sure that the server was started with /models/stage1"


@pytest.mark.parametrize(
    ("behaviour", "fix"),
    [
        (lambda call: error(500), "read the server's log and restart it"),
        (lambda call: Answer(body=b"[]"), "start swift-stage2 rollout or swift rollout (ms-swift 4.6)"),
        (lambda call: Answer(body=b"not json"), CORRECT),
    ],
)
def test_rollouts_that_are_none_fail_with_their_fix(
    server: FakeRolloutServer, behaviour: Behaviour, fix: str
) -> None:
    server.on_infer = behaviour
    outcome = ask_model(server, "/models/stage1")
    assert outcome.verdict is Verdict.FAILED
    assert fix in outcome.fix
