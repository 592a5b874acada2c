"""Remedies when a port cannot be reached; with real sockets and, in ``test_several_hosts``, real networks."""

from __future__ import annotations

import socket

import pytest

from swift_stage2.runtime.network import connection_error, group_remedy, http_remedy, local_address_towards


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
