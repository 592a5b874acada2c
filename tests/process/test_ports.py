"""Ports of this machine with real sockets: free, quiet, and who listens."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest
from launch.closed_connection import leave_closed_connection

from swift_stage2.errors import ConfigError
from swift_stage2.process.ports import Listener, is_here, is_quiet, listener_at, refuse_busy


def test_a_busy_port_is_named_with_its_holder_and_key(busy_port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_busy("127.0.0.1", busy_port, "rollout.servers[1].base_url")
    message = str(caught.value)
    for part in (f"port={busy_port}", "rollout.servers[1].base_url", f"process {os.getpid()}"):
        assert part in message
    assert "\n" not in message


def test_a_port_whose_last_connection_just_closed_is_free_but_not_quiet() -> None:
    port = leave_closed_connection()
    assert refuse_busy("127.0.0.1", port, "a server") == ("127.0.0.1", port)
    assert not is_quiet(port)  # ms-swift would take the next one
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        unused = int(probe.getsockname()[1])
    assert is_quiet(unused)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this machine only.*host='192\.0\.2\.1'"):
        refuse_busy("192.0.2.1", 8000, "a server")


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


@pytest.fixture
def _two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """``localhost`` is ::1 before it is 127.0.0.1, as on most machines."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        names = ("::1", "127.0.0.1") if host == "localhost" else (host,)
        return [entry for name in names for entry in real(name, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.usefixtures("_two_addresses")
def test_all_addresses_of_a_name_are_looked_at(busy_port: int) -> None:
    listener = listener_at("localhost", busy_port)
    assert listener is not None
    assert listener.pid == os.getpid()
    with pytest.raises(ConfigError, match="in use by process"):
        refuse_busy("localhost", busy_port, "rollout.servers[0].base_url")


def test_a_name_server_that_fails_for_a_moment_is_nobody_who_listens() -> None:
    assert listener_at("nowhere.invalid", 80) is None
