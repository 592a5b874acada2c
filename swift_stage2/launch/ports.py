"""Ports that servers are about to use: free now, and on this machine; addresses that the learner can reach."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from swift_stage2.config import ServerConfig, Stage2Config
from swift_stage2.errors import ConfigError
from swift_stage2.launch.plan import PlannedServer

_ANY_ADDRESS = ("0.0.0.0", "::")


def refuse_busy_ports(servers: Sequence[PlannedServer]) -> None:
    """Checks HTTP and weight-group port of every server. A stock server would silently take the next free
    port, and an old server that still holds it would answer in its place.

    Raises:
        ConfigError: a port is in use, two servers name one, or its host is not this machine; names the port and the
            key to change.
    """
    owners: dict[tuple[str, int], str] = {}
    for server in servers:
        for key, place in refuse_busy_server(server.address, server.key, server.upstream_port).items():
            if (owner := owners.setdefault(place, key)) != key:
                raise ConfigError(
                    f"every server needs ports of its own, got port {place[1]} of {place[0]}, however it is named, for "
                    f"both {owner} and {key}; give one of them another port"
                )


def refuse_busy_server(
    server: ServerConfig, key: str, upstream_port: int | None = None
) -> dict[str, tuple[str, int]]:
    """IP address and port of all that one server will listen on, by the key that names it. Raises as above."""
    ports = {f"{key}.base_url": refuse_busy(server.host, server.port, f"{key}.base_url")}
    ports[f"{key}.group_port"] = refuse_busy_group_port(server, key)
    if upstream_port is not None:
        name = f"{key.replace('rollout.', 'launch.', 1)}.upstream_port"
        ports[name] = refuse_busy(server.host, upstream_port, name)
    return ports


def refuse_busy_group_port(server: ServerConfig, key: str) -> tuple[str, int]:
    """Checks ``group_port`` where the server will listen, and ``group_bind``. Returns and raises as ``refuse_busy``."""
    if server.group_bind and not is_here(server.group_bind):
        raise ConfigError(
            f"{key}.group_bind must be an address of the server's host, not an interface, got "
            f"group_bind={server.group_bind!r}; write one that `ip address` shows there, or 0.0.0.0"
        )
    return refuse_busy(server.group_bind or server.host, server.group_port, f"{key}.group_port")


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


def refuse_lone_addresses(config: Stage2Config) -> None:
    """Checks that a learner of several hosts can reach its servers.

    Raises:
        ConfigError: a ``base_url`` means each host itself, or weights go to where ``group_bind`` does not listen.
    """
    nnodes = config.launch.learner.nnodes
    for index, server in enumerate(config.rollout.servers if nnodes > 1 else ()):
        key, host, bind = f"rollout.servers[{index}]", server.host, server.group_bind
        address = _lone_address(host)
        # A server that launch does not start may listen on more than its name means here.
        if address and (config.launch.servers or host in (address, "localhost")):
            raise ConfigError(
                f"{key}.base_url must lead every host of the learner to the server, got host={host!r}, which is "
                f"{address} here, and launch.learner.nnodes={nnodes}; write an address of the server's host in the "
                "network"
            )
        asked = server.group_host or host
        if bind and bind not in _ANY_ADDRESS and _lone_address(bind) and not _lone_address(asked):
            raise ConfigError(
                f"{key}.group_bind must be the address that the learner sends weights to, got group_bind={bind!r} and "
                f"host {asked!r}; write an address of the server's host in the network, or 0.0.0.0"
            )


def open_servers(servers: Sequence[PlannedServer], api_key: str | None) -> list[str]:
    """A warning for each that whoever is in the network can use."""
    return [
        f"{server.key}.base_url listens on {server.address.host} without a key: whoever reaches it can replace the "
        "weights; set the variable that rollout.api_key_env names here and for the learner"
        for server in servers
        if api_key is None and _lone_address(server.address.host) in ("", *_ANY_ADDRESS)
    ]


def lone_names(servers: Sequence[PlannedServer]) -> list[str]:
    """A warning for each whose host has a name that means this machine here alone, as a fresh Debian's own does."""
    return [
        f"{server.key}.base_url has host={host!r}, which is {address} on this machine, so that no other reaches the "
        "server; write its address in the network, or correct /etc/hosts"
        for server in servers
        if (address := _lone_address(host := server.address.host)) not in ("", host) and host != "localhost"
    ]


def _lone_address(host: str) -> str:
    """What ``host`` is where that means every machine itself, loopback or a wildcard; else, or if unknown, nothing."""
    try:
        address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return ""
    is_lone = ipaddress.ip_address(address).is_loopback or address in _ANY_ADDRESS
    return address if is_lone else ""


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


def refuse_busy(host: str, port: int, key: str) -> tuple[str, int]:
    """Checks one port; ``key`` is the one in the configuration that names it. Raises as ``refuse_busy_ports``.

    Returns its IP address and port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return str(address[0]), port
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
