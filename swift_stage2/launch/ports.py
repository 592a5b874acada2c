"""Ports that servers are about to use: free now, and on this machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from swift_stage2.errors import ConfigError
from swift_stage2.launch.plan import PlannedServer

_ANY_ADDRESS = ("0.0.0.0", "::")


def refuse_busy_ports(servers: Sequence[PlannedServer]) -> None:
    """Checks HTTP and weight-group port of every server. A stock server would silently take the next free
    port, and an old server that still holds it would answer in its place.

    Raises:
        ConfigError: a port is in use, or its host is not this machine; names the port and the key to change.
    """
    for server in servers:
        host = server.address.host
        refuse_busy(host, server.address.port, f"{server.key}.base_url")
        refuse_busy(server.address.group_bind or host, server.address.group_port, f"{server.key}.group_port")
        if server.upstream_port is not None:
            key = server.key.replace("rollout.", "launch.", 1)
            refuse_busy(host, server.upstream_port, f"{key}.upstream_port")


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens on a port; no ``pid`` when the process is another user's."""

    pid: int | None
    name: str

    def is_below(self, pid: int) -> bool:
        """Whether it is process ``pid`` or one that hangs below it."""
        if self.pid is None:
            return False
        try:
            return self.pid == pid or any(parent.pid == pid for parent in psutil.Process(self.pid).parents())
        except psutil.Error:
            return False


def listener_at(host: str, port: int) -> Listener | None:
    """Who would answer at this address of this machine; None when nobody listens there."""
    found = _look_for_listener(host, port)
    if found is not None and found.pid is None:
        # Processes are looked at before sockets are: whoever began to listen between had a socket and no process.
        found = _look_for_listener(host, port)
    return found


def _look_for_listener(host: str, port: int) -> Listener | None:
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    for connection in psutil.net_connections(kind="tcp"):
        local = connection.laddr
        if connection.status != psutil.CONN_LISTEN or not local or local.port != port:
            continue
        if local.ip not in (address, *_ANY_ADDRESS):
            continue
        try:
            name = "another user's" if connection.pid is None else psutil.Process(connection.pid).name()
        except psutil.Error:
            continue  # it has just ended
        return Listener(connection.pid, name)
    return None


def is_quiet(port: int) -> bool:
    """Whether a stock server would take this port. It asks without SO_REUSEADDR and on every address, so that
    connections of an earlier server, kept by the system for a minute after they closed, move it to the next port.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def is_here(host: str) -> bool:
    """Whether ``host`` is an address of this machine, or a name of one: whether it can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def refuse_deaf_endpoint(endpoint: str) -> None:
    """Checks ``launch.learner.rdzv_endpoint``, which torchrun would wait for without a word.

    Raises:
        ConfigError: its host has no address here, or it is this machine's and its port is in use.
    """
    host, _, port = endpoint.rpartition(":")
    host, key = host.strip("[]"), "launch.learner.rdzv_endpoint"
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(
            f"{key} must have a name that this machine can resolve, got host={host!r} ({exc}); correct it, or write an "
            "address"
        ) from exc
    if is_here(host):
        refuse_busy(host, int(port), key)


def refuse_busy(host: str, port: int, key: str) -> None:
    """Checks one port; ``key`` is the one in the configuration that names it. Raises as ``refuse_busy_ports``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {key} must be free, got port={port} in use{holder_of(port)}; "
                f"end that process, or change {key}"
            ) from exc
        if exc.errno == errno.EACCES:
            raise ConfigError(f"port {port} of {key} must be open to this user; change {key}") from exc
        raise ConfigError(
            f"launch starts servers on this machine only, got {key} with host={host!r} ({exc}); "
            f"change {key}, or say launch --servers-only there and launch --learner-only here"
        ) from exc


def holder_of(port: int) -> str:
    """Who listens there, as far as this user may know: `` by process N (NAME)``, or nothing."""
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
