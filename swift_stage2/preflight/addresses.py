"""Refuses addresses that lead nowhere, or each host to itself, and ports that are taken, before anything starts.

A stock server would silently take the next free port, and an old server that still holds one would answer in its place.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from swift_stage2.config import ServerConfig, Stage2Config
from swift_stage2.errors import ConfigError
from swift_stage2.process.ports import ANY_ADDRESS, is_here, refuse_busy


def refuse_busy_ports(config: Stage2Config, indices: Iterable[int]) -> list[int]:
    """Checks the HTTP and weight-group ports of the servers of ``launch.servers`` with these numbers; returns them.

    Raises:
        ConfigError: a port is in use, two servers name one, or its host is not this machine; names the port and the
            key to change.
    """
    owners: dict[tuple[str, int], str] = {}
    for index in indices:
        server, key = config.rollout.servers[index], f"rollout.servers[{index}]"
        places = {f"{key}.base_url": refuse_busy(server.host, server.port, f"{key}.base_url")}
        places[f"{key}.group_port"] = refuse_busy_group_port(server, key)
        if (upstream_port := config.launch.servers[index].upstream_port) is not None:
            name = f"launch.servers[{index}].upstream_port"
            places[name] = refuse_busy(server.host, upstream_port, name)
        for name, place in places.items():
            if (owner := owners.setdefault(place, name)) != name:
                raise ConfigError(
                    f"every server needs ports of its own, got port {place[1]} of {place[0]}, however it is named, for "
                    f"both {owner} and {name}; give one of them another port"
                )
    return [port for _, port in owners]


def refuse_busy_group_port(server: ServerConfig, key: str) -> tuple[str, int]:
    """Checks ``group_port`` where the server will listen, and ``group_bind``. Returns and raises as ``refuse_busy``."""
    if server.group_bind and not is_here(server.group_bind):
        raise ConfigError(
            f"{key}.group_bind must be an address of the server's host, not an interface, got "
            f"group_bind={server.group_bind!r}; write one that `ip address` shows there, or 0.0.0.0"
        )
    return refuse_busy(server.group_bind or server.host, server.group_port, f"{key}.group_port")


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
        if bind and bind not in ANY_ADDRESS and _lone_address(bind) and not _lone_address(asked):
            raise ConfigError(
                f"{key}.group_bind must be the address that the learner sends weights to, got group_bind={bind!r} and "
                f"host {asked!r}; write an address of the server's host in the network, or 0.0.0.0"
            )


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


def warn_of_servers(config: Stage2Config, indices: Iterable[int]) -> list[str]:
    """A warning for each server here whose name means this machine alone, as a fresh Debian's own does, or that whoever
    is in the network can use.
    """
    warnings: list[str] = []
    for index in indices:
        key, host = f"rollout.servers[{index}].base_url", config.rollout.servers[index].host
        address = _lone_address(host)
        if address not in ("", host) and host != "localhost":
            warnings.append(
                f"{key} has host={host!r}, which is {address} on this machine, so that no other reaches the server; "
                "write its address in the network, or correct /etc/hosts"
            )
        if config.rollout.api_key() is None and address in ("", *ANY_ADDRESS):
            warnings.append(
                f"{key} listens on {host} without a key: whoever reaches it can replace the weights; set the variable "
                "that rollout.api_key_env names here and for the learner"
            )
    return warnings


def _lone_address(host: str) -> str:
    """What ``host`` is where that means every machine itself, loopback or a wildcard; else, or if unknown, nothing."""
    try:
        address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return ""
    is_lone = ipaddress.ip_address(address).is_loopback or address in ANY_ADDRESS
    return address if is_lone else ""
