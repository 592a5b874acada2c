"""Whom rank 0 lets join: real HTTP servers that are ours, another program, silent, of another model or locked."""

from __future__ import annotations

from typing import Any

import pytest
from builders import config_of, servers_at
from fake_rollout_server import Answer, FakeRolloutServer
from fake_staging_server import FakeStagingServer
from free_port import free_port

from swift_stage2.config import ServerConfig, Stage2Config
from swift_stage2.errors import ConfigError, ServerFault, ServerUnavailable
from swift_stage2.learner.server_requests import AddedServer
from swift_stage2.preflight import joining_server, servers
from swift_stage2.preflight.joining_server import admit
from swift_stage2.servers.protocol import TensorSpec

MANIFEST = (TensorSpec("lm_head.weight", (4, 2), "float32"),)
FIRST = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_server, "_PATIENCE_S", 60.0)  # a server that answers may be slow


@pytest.fixture
def short(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that never answer as they should."""
    monkeypatch.setattr(joining_server, "_PATIENCE_S", 0.5)


def config(**rollout: Any) -> Stage2Config:
    """Of a run whose launch starts its servers, which says nothing of those that join."""
    changes = servers_at(FIRST, group_port=29700) | {"launch.servers": [{"engine": "vllm"}]}
    return config_of(changes, {f"rollout.{key}": value for key, value in rollout.items()})


def at(url: str, **address: Any) -> ServerConfig:
    return ServerConfig(base_url=url, **{"group_port": 29800, **address})


def test_a_server_of_ours_with_the_runs_tensors_may_join() -> None:
    with FakeStagingServer(MANIFEST) as server:
        assert admit(config(), MANIFEST, at(server.url)) == AddedServer(address=at(server.url), is_ours=True)


def test_a_server_of_the_run_does_not_join_by_another_name() -> None:
    """Its rounds would end each other. Who answers nobody, like the first server here, is passed over."""
    with FakeStagingServer(MANIFEST) as server:
        name = server.url.replace("127.0.0.1", "127.1")
        with pytest.raises(ConfigError, match=f"got URL={name}, which is {server.url} by another name"):
            admit(config(), MANIFEST, at(name), [at(server.url)])


def test_the_runs_key_goes_to_no_host_that_its_configuration_does_not_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "secret")
    monkeypatch.setattr(joining_server, "look_for", lambda *_: pytest.fail("it was asked, with the key"))
    with pytest.raises(ConfigError, match="hosts that its configuration names") as refused:
        admit(config(), MANIFEST, at("http://10.9.8.7:8000"))
    assert "secret" not in str(refused.value)


def test_what_joins_travels_as_json() -> None:
    added = AddedServer(address=at(FIRST, group_bind="0.0.0.0"), is_ours=False, chat_model="m")
    assert AddedServer.from_json(added.to_json()) == added


def test_a_stock_server_may_join_where_vllm_is_beside_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRolloutServer() as server:
        monkeypatch.setattr(servers, "vllm_is_installed", lambda: False)
        with pytest.raises(ConfigError, match="vLLM must be installed beside the learner"):
            admit(config(), MANIFEST, at(server.url))
        monkeypatch.setattr(servers, "vllm_is_installed", lambda: True)
        assert admit(config(), MANIFEST, at(server.url)) == AddedServer(address=at(server.url), is_ours=False)


def test_one_that_cannot_resume_may_not_join_a_run_that_does() -> None:
    with FakeRolloutServer() as server, pytest.raises(ConfigError, match="on_pending: resume needs servers"):
        admit(config(sync={"on_pending": "resume"}), MANIFEST, at(server.url))


def test_other_tensors_are_refused_by_name() -> None:
    other = (TensorSpec("lm_head.weight", (8, 2), "float32"),)
    with (
        FakeStagingServer(other) as server,
        pytest.raises(ServerFault, match=r"learner \(4, 2\) server \(8, 2\)"),
    ):
        admit(config(), MANIFEST, at(server.url))


def test_a_server_that_does_not_answer_is_refused(short: None) -> None:
    with pytest.raises(ServerUnavailable, match="must answer rank 0 before it is added"):
        admit(config(), MANIFEST, at(f"http://127.0.0.1:{free_port()}"))


def test_another_program_is_refused(short: None) -> None:
    with (
        FakeRolloutServer(on_get=lambda call: Answer(body=b"<html>")) as server,
        pytest.raises((ConfigError, ServerUnavailable), match=server.url),
    ):
        admit(config(), MANIFEST, at(server.url))


def test_a_key_that_the_server_refuses_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", "sk-wrong-and-secret")
    with FakeRolloutServer(on_get=lambda call: Answer(status=401, body=b"sk-wrong-and-secret")) as server:
        with pytest.raises(ServerUnavailable) as refusal:
            admit(config(), MANIFEST, at(server.url))
    assert "API_KEY" in str(refusal.value) or "api_key_env" in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (at(FIRST), f"is added once, got URL={FIRST}"),
        (at("http://127.0.0.1:8002"), "is added once, got URL=http://127.0.0.1:8002"),
        (
            at("http://127.0.0.1:8003", group_port=29700),
            r"a --group-port of its own, got port 29700 .* both "
            r"servers\[0\]\.group_port and --group-port;",
        ),
        (at("http://127.0.0.1:8003", group_port=29900), "a --group-port of its own, got port 29900"),
    ],
)
def test_addresses_of_the_others_are_refused_before_anybody_is_asked(
    server: ServerConfig, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        admit(config(), MANIFEST, server, [at("http://127.0.0.1:8002", group_port=29900)])


def test_a_server_that_cannot_map_rank_zeros_memory_is_refused_where_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "is_here", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(servers, "addresses_of", lambda host, port: [host])
    with pytest.raises(ConfigError, match="needs every server on rank 0's machine"):
        admit(config(sync={"transport": "shared_memory"}), MANIFEST, at("http://10.0.0.5:8003"))
