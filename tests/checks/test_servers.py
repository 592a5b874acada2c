"""Addresses and ports that a run names are looked at before anything starts."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, servers_at
from free_port import free_port

from swift_stage2.checks.servers import (
    refuse_busy_ports,
    refuse_deaf_endpoint,
    refuse_lone_addresses,
    warn_of_open_servers,
)
from swift_stage2.config import Stage2Config
from swift_stage2.errors import ConfigError
from swift_stage2.launch.launcher import launch
from swift_stage2.launch.plan import LaunchPart
from swift_stage2.runtime import network


def started(*servers: dict[str, Any]) -> Stage2Config:
    """Servers that launch starts."""
    return config_of({"rollout.servers": list(servers), "launch.servers": [{} for _ in servers]})


def here(port: int, group_port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"base_url": f"http://{host}:{port}", "group_port": group_port}


def test_a_busy_port_is_named_with_its_holder_and_key(busy_port: int) -> None:
    config = started(here(busy_port, free_port()), here(free_port(), free_port()))
    with pytest.raises(ConfigError, match=rf"port={busy_port} .*process {os.getpid()} .*\[0\]\.base_url"):
        refuse_busy_ports(config, [0])
    refuse_busy_ports(config, [1])
    config = started(here(free_port(), free_port()), here(free_port(), busy_port))
    with pytest.raises(ConfigError, match=rf"port={busy_port} .*change rollout\.servers\[1\]\.group_port"):
        refuse_busy_ports(config, [0, 1])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /etc/hosts of a fresh Debian: the machine's own name means it alone. A neighbour has an address."""
    known, real = {"debian": "127.0.1.1", "twin": "127.0.0.1", "neighbour": "192.0.2.1"}, socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **options: real(known.get(host, host), *more, **options)
    )


@pytest.mark.parametrize(
    ("server", "is_started", "message"),
    [
        (
            {"base_url": "http://127.0.0.1:8000"},
            False,
            r"base_url .*host='127\.0\.0\.1', which is 127\.0\.0\.1",
        ),
        ({"base_url": "http://localhost:8000"}, False, "host='localhost'"),
        ({"base_url": "http://0.0.0.0:8000"}, False, r"host='0\.0\.0\.0'"),
        ({"base_url": "http://debian:8000"}, True, r"host='debian', which is 127\.0\.1\.1 here"),
        ({"base_url": "http://debian:8000"}, False, ""),  # who started it may have said --host 0.0.0.0
        ({"base_url": "http://neighbour:8000"}, True, ""),
        ({"base_url": "http://nowhere.invalid:8000"}, True, ""),
        ({"base_url": "http://neighbour:8000", "group_bind": "0.0.0.0"}, True, ""),
    ],
)
@pytest.mark.usefixtures("names")
def test_a_learner_of_several_hosts_needs_addresses_that_lead_elsewhere(
    server: dict[str, str], is_started: bool, message: str
) -> None:
    learner = {"nnodes": 2, "rdzv_endpoint": "neighbour:29400"}
    alone = {"rollout.servers": [server], "launch.servers": [{}] if is_started else []}
    refuse_lone_addresses(config_of(alone))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        refuse_lone_addresses(config_of(alone, {"launch.learner": learner}))


@pytest.mark.parametrize(("key", "are_told"), [("", True), ("hush", False)])
@pytest.mark.usefixtures("names")
def test_servers_that_others_reach_without_a_key_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, key: str, are_told: bool
) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", key)
    config = started(*(here(free_port(), free_port(), host) for host in ("debian", "localhost", "0.0.0.0")))
    warnings = warn_of_open_servers(config)
    assert bool(warnings) is are_told
    assert all("servers[2].base_url listens on 0.0.0.0 without a key" in line for line in warnings)


def test_a_resolver_that_hangs_does_not_hold_up_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(20.0))
    monkeypatch.setattr(network, "_RESOLVE_TIMEOUT_S", 0.05)
    config = config_of(servers_at("http://slow.host:8000", group_port=29600))
    try:
        (told,) = warn_of_open_servers(config)
        error = network.connection_error("slow.host", 8000, 5.0)
        assert not network.is_here("slow.host")
    finally:
        released.set()
    assert "no answer from the resolver" in str(error)
    assert told.startswith("rollout.servers[0].base_url listens on slow.host without a key")


def test_servers_alone_are_refused_where_none_is_this_machines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"swift: {{model: m, output_dir: {tmp_path / 'run'}}}\n"
        "stage2_ab: {schedule: {b_ratio: 0.5}}\n"
        "rollout: {servers: [{base_url: 'http://192.0.2.1:8000'}]}\n"
        "launch: {servers: [{}]}\n"
    )
    with pytest.raises(ConfigError, match=r"got hosts=192\.0\.2\.1"):
        launch(str(path), part=LaunchPart.SERVERS)
    assert not (tmp_path / "run").exists()


def test_a_rendezvous_that_torchrun_would_wait_for_in_silence_is_refused(busy_port: int) -> None:
    def look(endpoint: str | None) -> None:
        several = {"nnodes": 2, "rdzv_endpoint": endpoint} if endpoint else {}
        refuse_deaf_endpoint(config_of({"launch.learner": several}))

    with pytest.raises(ConfigError, match=r"rdzv_endpoint must have a name .*, got host='nowhere\.invalid'"):
        look("nowhere.invalid:29400")
    with pytest.raises(
        ConfigError, match=rf"port {busy_port} of launch\.learner\.rdzv_endpoint must be free"
    ):
        look(f"127.0.0.1:{busy_port}")
    look(f"127.0.0.1:{free_port()}")
    look(None)
