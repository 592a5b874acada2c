"""Ports that servers are about to use: free now, and on this machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import psutil

from swift_stage2.errors import ConfigError
from swift_stage2.launch.plan import PlannedServer


def refuse_busy_ports(servers: Sequence[PlannedServer]) -> None:
    """Checks HTTP and weight-group port of every server. A stock server would silently take the next free
    port, and an old server that still holds it would answer in its place.

    Raises:
        ConfigError: a port is in use, or its host is not this machine; names the port and the key to change.
    """
    for server in servers:
        host = server.address.host
        _refuse_busy(host, server.address.port, f"{server.key}.base_url")
        _refuse_busy(host, server.address.group_port, f"{server.key}.group_port")


def _refuse_busy(host: str, port: int, key: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {key} must be free, got port={port} in use{_holder(port)}; "
                f"end that process, or change {key}"
            ) from exc
        if exc.errno == errno.EACCES:
            raise ConfigError(f"port {port} of {key} must be open to this user; change {key}") from exc
        raise ConfigError(
            f"launch starts servers on this machine only, got {key} with host={host!r} ({exc}); "
            f"change {key}, or start that server yourself and leave launch.servers empty"
        ) from exc


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            local = connection.laddr
            if local and local.port == port and connection.pid and connection.status == psutil.CONN_LISTEN:
                who = (
                    "this very process"
                    if connection.pid == os.getpid()
                    else psutil.Process(connection.pid).name()
                )
                return f" by process {connection.pid} ({who})"
    except (psutil.Error, OSError):
        pass
    return ""
