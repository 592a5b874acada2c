"""Remedies when a port cannot be reached; with real sockets and, in ``test_several_hosts``, real networks."""

from __future__ import annotations

import errno
import socket

import pytest

from swift_stage2.runtime.route import connection_error, group_remedy, http_remedy, local_address_towards


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


@pytest.mark.parametrize(
    ("error", "http", "group"),
    [
        (
            socket.gaierror(-2, "Name or service not known"),
            "write the host of base_url as a name",
            "group_host",
        ),
        (
            OSError(errno.EHOSTUNREACH, "No route to host"),
            "no route there, or a firewall rejects",
            "group_host",
        ),
        (
            TimeoutError("timed out"),
            "open the port of base_url in every firewall",
            "open group_port in every firewall",
        ),
        (
            OSError("something else answers"),
            "check scheme, host and port",
            "another program may hold group_port",
        ),
    ],
)
def test_every_kind_of_failure_has_a_remedy_of_its_own(error: OSError, http: str, group: str) -> None:
    assert http in http_remedy(error)
    assert group in group_remedy(error)
