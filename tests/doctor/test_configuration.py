"""Hosts, proxies and ports: what is told, and that no secret is."""

from __future__ import annotations

import socket

import pytest
from live_server import free_port

from swift_stage2.config import ServerConfig
from swift_stage2.doctor import configuration
from swift_stage2.doctor.examination import Verdict
from swift_stage2.errors import ConfigError
from swift_stage2.runtime import route

KEY = "rollout.servers[0]"


def at(port: int, host: str = "127.0.0.1", group_port: int = 51216) -> ServerConfig:
    return ServerConfig(base_url=f"http://{host}:{port}", group_port=group_port)


def test_a_name_that_nobody_knows_fails_with_the_key_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    outcome = configuration.check_host(at(8000, "no.such.host"))
    assert outcome.verdict is Verdict.FAILED
    assert "Name or service not known" in outcome.found
    assert "base_url http://no.such.host:8000" in outcome.fix


def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    released = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        released.wait(20.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(route, "_RESOLVE_TIMEOUT_S", 0.05)
    try:
        outcome = configuration.check_host(at(8000, "slow.host"))
    finally:
        released.set()
    assert outcome.verdict is Verdict.FAILED
    assert "no answer from the resolver within 0.05 s" in outcome.found


def test_a_proxy_is_named_as_ignored_and_its_password_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:pa55@proxy:3128")
    outcome = configuration.check_host(at(8000))
    assert outcome.verdict is Verdict.OK
    assert "http_proxy would catch it and is ignored" in outcome.found
    assert "pa55" not in outcome.found
    assert "(this machine)" in outcome.found


def test_a_proxy_that_no_proxy_keeps_away_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "http_proxy" not in configuration.check_host(at(8000)).found


def test_the_port_that_weights_travel_over_must_be_free(busy_port: int) -> None:
    with pytest.raises(ConfigError, match=r"change rollout\.servers\[0\]\.group_port"):
        configuration.check_group_port_free(at(free_port(), group_port=busy_port), "127.0.0.1", KEY)


def test_a_group_port_elsewhere_is_left_to_the_dry_round() -> None:
    assert "dry round" in configuration.check_group_port_free(at(8000, "10.0.0.7"), "10.0.0.7", KEY).found


def test_a_port_where_nobody_listens_fails_with_what_to_start(busy_port: int) -> None:
    reachable = configuration.check_reachable(at(busy_port), "127.0.0.1", KEY, must_answer=True)
    assert f"port {busy_port} is open" in reachable.found
    outcome = configuration.check_reachable(at(free_port()), "127.0.0.1", KEY, must_answer=True)
    assert outcome.verdict is Verdict.FAILED
    assert "start the server there" in outcome.fix
    assert "rollout.servers[0].base_url" in outcome.fix
