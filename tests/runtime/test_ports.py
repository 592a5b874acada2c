"""Ports of this machine with real sockets, free, quiet, or held, and remedies when one cannot be reached."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from launch.closed_connection import leave_closed_connection

from swift_stage2.errors import ConfigError
from swift_stage2.runtime.network import (
    connection_error,
    group_remedy,
    http_remedy,
    is_here,
    is_quiet,
    local_address_towards,
    refuse_busy,
)


def test_a_port_whose_last_connection_just_closed_is_free_but_not_quiet() -> None:
    port = leave_closed_connection()
    refuse_busy("127.0.0.1", port, "a server")
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
    with pytest.raises(ConfigError, match="in use by process"):
        refuse_busy("localhost", busy_port, "rollout.servers[0].base_url")


def test_the_address_on_the_way_to_this_machine_is_its_own() -> None:
    assert local_address_towards("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        local_address_towards("nowhere.invalid", 1)


def test_a_port_that_listens_has_no_error_and_a_closed_one_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert connection_error("127.0.0.1", port, 5.0) is None
    error = connection_error("127.0.0.1", port, 5.0)
    assert isinstance(error, ConnectionRefusedError)
    assert "group_bind must be the address" in group_remedy(error)
    assert "start the server there" in http_remedy(error)
