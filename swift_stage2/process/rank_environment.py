"""Refuses a half-set torchrun environment, or one in which gloo finds no address that other hosts reach, in one line.

Before torch or ms-swift stumble over it; imports neither.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from swift_stage2.errors import UserError
from swift_stage2.process.tcp_probe import local_address_towards

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_ADDRESS = "MASTER_ADDR"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_MAKES_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def check_rank_environment(environment: Mapping[str, str]) -> None:
    """Whether this process is one rank of several, with all that says so, or none of it.

    Raises:
        UserError: a variable of torchrun's is missing beside the others, is no number, or is too large.
    """
    given = [name for name in _MAKES_A_RANK if name in environment]
    if not given:
        return
    remedy = (
        "start ranks with torchrun --nproc_per_node N -m swift_stage2 train CONFIG.yaml, or unset them all"
    )
    if missing := [name for name in (*_NUMBERS, _ADDRESS) if name not in environment]:
        raise UserError(
            f"torchrun's variables come together, got {', '.join(given)} without {', '.join(missing)} in the "
            f"environment; {remedy}"
        )
    for name in _NUMBERS:
        if not environment[name].isdecimal():
            raise UserError(
                f"{name} in the environment must be a whole number, got {name}={environment[name]!r}; {remedy}"
            )
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(
            f"RANK in the environment must be below WORLD_SIZE, got RANK={rank} WORLD_SIZE={world_size}; {remedy}"
        )


def check_gloo_address(environment: Mapping[str, str]) -> None:
    """Whether ranks on other hosts can reach this one over gloo, which decisions travel over on every machine.

    Raises:
        UserError: several hosts, no interface named, and gloo would take an address that no other host reaches.
    """
    total, local = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    master = environment.get(_ADDRESS, "")
    if (
        local in (None, total)
        or master in ("", "localhost", "127.0.0.1", "::1")
        or environment.get(_INTERFACE)
    ):
        return
    address = _address_gloo_takes()
    if not _is_loopback(address):
        return
    try:
        route = local_address_towards(master, int(environment["MASTER_PORT"]))
    except OSError:
        return  # torch says so itself when it connects there
    reachable = _reachable_addresses()
    best = next((name for name, own in reachable if own == route), None)
    names = ", ".join(f"{name} ({own})" for name, own in reachable)
    remedy = f"set {_INTERFACE}={best}" if best else f"set {_INTERFACE} to one of {names}"
    raise UserError(
        "ranks on several hosts talk over gloo, which takes the address of this host's name, got "
        f"{socket.gethostname()} = {address}, which no other host reaches; {remedy} in this host's environment"
    )


def _address_gloo_takes() -> str:
    """The first address of this host's name that can be bound, else loopback: as PyTorch chooses it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            return str(address[0])
        except OSError:
            continue
    return "127.0.0.1"


def _reachable_addresses() -> list[tuple[str, str]]:
    """Interface and address of what other hosts may reach."""
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not _is_loopback(entry.address)
    ]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
