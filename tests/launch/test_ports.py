"""Ports are checked before anything starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from closed_connection import leave_closed_connection

from swift_stage2.config import ServerConfig, Stage2Config
from swift_stage2.config.binding import bind
from swift_stage2.errors import ConfigError
from swift_stage2.launch import launcher
from swift_stage2.launch.launcher import launch
from swift_stage2.launch.plan import LaunchPart, PlannedServer
from swift_stage2.launch.ports import (
    Listener,
    is_here,
    is_quiet,
    listener_at,
    refuse_busy_ports,
    refuse_deaf_endpoint,
    refuse_lone_addresses,
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


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /etc/hosts of a fresh Debian: the machine's own name means it alone. A neighbour has an address."""
    known, real = {"debian": "127.0.1.1", "twin": "127.0.0.1", "neighbour": "192.0.2.1"}, socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **options: real(known.get(host, host), *more, **options)
    )


@pytest.mark.usefixtures("names")
def test_two_names_of_one_machine_are_one_place() -> None:
    port, group_port = unused_port(), unused_port()
    two = [
        planned(f"http://{host}:{port + index}", group_port)
        for index, host in enumerate(("twin", "127.0.0.1"))
    ]
    with pytest.raises(
        ConfigError, match=rf"got port {group_port} of 127\.0\.0\.1, however it is named, for both"
    ):
        refuse_busy_ports([two[0], replace(two[1], key="rollout.servers[2]")])


def test_an_interface_is_no_address_to_listen_on() -> None:
    server = planned(f"http://127.0.0.1:{unused_port()}", unused_port())
    server = replace(server, address=replace(server.address, group_bind="ib0"))
    with pytest.raises(
        ConfigError, match=r"servers\[1\]\.group_bind must be an address .*group_bind='ib0'; write one"
    ):
        refuse_busy_ports([server])


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
        (
            {"base_url": "http://neighbour:8000", "group_bind": "127.0.0.1"},
            True,
            "group_bind='127.0.0.1' and host 'neighbour'",
        ),
        (  # beside rank 0, which alone sends weights
            {"base_url": "http://neighbour:8000", "group_bind": "127.0.0.1", "group_host": "localhost"},
            True,
            "",
        ),
    ],
)
@pytest.mark.usefixtures("names")
def test_a_learner_of_several_hosts_needs_addresses_that_lead_elsewhere(
    server: dict[str, str], is_started: bool, message: str
) -> None:
    learner = {"nnodes": 2, "rdzv_endpoint": "neighbour:29400"}
    data = {
        "swift": {"model": "m"},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "rollout": {"servers": [server]},
        "launch": {"servers": [{}] if is_started else []},
    }
    refuse_lone_addresses(bind(Stage2Config, data))
    several = bind(Stage2Config, data | {"launch": data["launch"] | {"learner": learner}})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        refuse_lone_addresses(several)


@pytest.mark.parametrize(("key", "open_hosts"), [("", ["0.0.0.0"]), ("hush", [])])
@pytest.mark.usefixtures("names")
def test_servers_alone_warn_of_open_ports_and_of_names_that_lead_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, open_hosts: list[str]
) -> None:
    monkeypatch.setenv("SWIFT_ROLLOUT_API_KEY", key)
    monkeypatch.setattr(launcher, "run_plan", lambda *_: 0)
    hosts = ("debian", "localhost", "0.0.0.0")
    urls = [{"base_url": f"http://{host}:{unused_port()}", "group_port": unused_port()} for host in hosts]
    path = tmp_path / "run.yaml"
    path.write_text(
        f"swift: {{model: m, output_dir: {tmp_path / 'run'}}}\n"
        "stage2_ab: {schedule: {b_ratio: 0.5}}\n"
        f"rollout: {{servers: {json.dumps(urls)}}}\n"
        f"launch: {{servers: {json.dumps([{}, {}, {}])}}}\n"
    )
    told: list[str] = []
    assert launch(str(path), part=LaunchPart.SERVERS, show=told.append) == 0
    warnings = [line for line in told if "warning: " in line]
    assert "servers[0].base_url has host='debian', which is 127.0.1.1 on this machine" in warnings[0]
    assert all(
        f"servers[2].base_url listens on {host} without a key" in line and "rollout.api_key_env" in line
        for host, line in zip(open_hosts, warnings[1:], strict=True)
    )


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
