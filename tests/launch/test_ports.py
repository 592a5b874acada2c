"""Ports are checked before anything starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from closed_connection import leave_closed_connection

from swift_stage2.config import ServerConfig
from swift_stage2.errors import ConfigError
from swift_stage2.launch.launcher import launch
from swift_stage2.launch.plan import LaunchPart, PlannedServer
from swift_stage2.launch.ports import (
    Listener,
    is_here,
    is_quiet,
    listener_at,
    refuse_busy_ports,
    refuse_deaf_endpoint,
)
from swift_stage2.launch.process_tree import Command


def planned(base_url: str, group_port: int) -> PlannedServer:
    command = Command(name="server1", argv=("x",), environment={}, grace_s=1.0)
    return PlannedServer(
        command=command,
        address=ServerConfig(base_url=base_url, group_port=group_port),
        key="rollout.servers[1]",
    )


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_free_ports_pass() -> None:
    refuse_busy_ports([planned(f"http://127.0.0.1:{unused_port()}", unused_port())])


def test_a_busy_http_port_is_named_with_its_holder_and_key(busy_port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_busy_ports([planned(f"http://127.0.0.1:{busy_port}", unused_port())])
    message = str(caught.value)
    for part in (f"port={busy_port}", "rollout.servers[1].base_url", f"process {os.getpid()}"):
        assert part in message
    assert "\n" not in message


def test_a_busy_group_port_is_named_with_its_key(busy_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"port={busy_port} .*change rollout\.servers\[1\]\.group_port"):
        refuse_busy_ports([planned(f"http://127.0.0.1:{unused_port()}", busy_port)])


def test_a_port_whose_last_connection_just_closed_is_free_but_not_quiet() -> None:
    port = leave_closed_connection()
    refuse_busy_ports([planned(f"http://127.0.0.1:{port}", unused_port())])
    assert not is_quiet(port)  # ms-swift would take the next one
    assert is_quiet(unused_port())


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this machine only.*host='192\.0\.2\.1'"):
        refuse_busy_ports([planned("http://192.0.2.1:8000", 8001)])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", True),
        ("192.0.2.1", False),
        ("nowhere.invalid", False),
    ],
)
def test_a_host_is_this_machine_if_it_can_be_bound(host: str, expected: bool) -> None:
    assert is_here(host) is expected


def test_servers_alone_are_refused_where_none_is_this_machines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"swift: {{model: m, output_dir: {tmp_path / 'run'}}}\n"
        "stage2_ab: {schedule: {b_ratio: 0.5}}\n"
        "rollout: {servers: [{base_url: 'http://192.0.2.1:8000'}]}\n"
        "launch: {servers: [{}]}\n"
    )
    with pytest.raises(ConfigError, match=r"got launch\.servers with hosts=192\.0\.2\.1"):
        launch(str(path), part=LaunchPart.SERVERS)
    assert not (tmp_path / "run").exists()


def test_a_listener_is_known_by_its_process(busy_port: int) -> None:
    listener = listener_at("127.0.0.1", busy_port)
    assert listener is not None
    assert listener.pid == os.getpid()
    assert listener.is_below(os.getpid())


def test_who_began_to_listen_while_processes_were_looked_at_is_looked_for_again(
    busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look finds the socket and, as it is too new, no process."""
    looks, real = [], psutil.net_connections

    def net_connections(kind: str) -> list[Any]:
        found = real(kind=kind)
        looks.append(kind)
        return [entry._replace(pid=None) for entry in found] if len(looks) == 1 else found

    monkeypatch.setattr(psutil, "net_connections", net_connections)
    listener = listener_at("127.0.0.1", busy_port)
    assert listener is not None
    assert listener.pid == os.getpid()
    assert len(looks) == 2


def test_another_users_listener_has_no_process_at_any_look(
    busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = psutil.net_connections
    monkeypatch.setattr(
        psutil, "net_connections", lambda kind: [entry._replace(pid=None) for entry in real(kind=kind)]
    )
    assert listener_at("127.0.0.1", busy_port) == Listener(None, "another user's")


def test_a_rendezvous_that_torchrun_would_wait_for_in_silence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rdzv_endpoint must have a name .*, got host='nowhere\.invalid'"):
        refuse_deaf_endpoint("nowhere.invalid:29400")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of launch\.learner\.rdzv_endpoint must be free"):
            refuse_deaf_endpoint(f"127.0.0.1:{port}")
    refuse_deaf_endpoint(f"127.0.0.1:{port}")
