"""Ports and addresses of this machine: what is its own, what is free, and who holds it."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack, suppress

import psutil

from swift_stage2.errors import ConfigError

ANY_ADDRESS = ("0.0.0.0", "::")


def holder_of(port: int) -> str:
    """Who listens there, as far as this user may know: `` by process N (NAME)``, or nothing."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                name = "this very process" if each.pid == os.getpid() else psutil.Process(each.pid).name()
                return f" by process {each.pid} ({name})"
    return ""


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


def is_free(host: str, port: int) -> bool:
    """Whether this user can bind a listening socket to the port now."""
    try:
        refuse_busy(host, port, "")
    except ConfigError:
        return False
    return True


def free_ports(count: int) -> tuple[int, ...]:
    """Ports on the loopback address that nobody listens on now, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return tuple(each.getsockname()[1] for each in sockets)


def refuse_busy(host: str, port: int, key: str) -> tuple[str, int]:
    """Checks one port; ``key`` is the one in the configuration that names it. Returns its IP address and port.

    Raises:
        ConfigError: the port is in use or closed to this user, or ``host`` is not this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for number, told in enumerate(addresses):  # of a name with several a server may take any one
            family, kind, protocol, _, address = told
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as exc:
                if number == 0 or exc.errno == errno.EADDRINUSE:
                    raise
        return str(addresses[0][4][0]), port
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {key} must be free",
                got=f"port={port} in use{holder_of(port)}",
                remedy=f"end that process, or change {key}",
            ) from exc
        if exc.errno == errno.EACCES:
            raise ConfigError(
                f"port {port} of {key} must be open to this user", remedy=f"change {key}"
            ) from exc
        raise ConfigError(
            "launch starts servers on this machine only",
            got=f"{key} with host={host!r} ({exc})",
            remedy=f"change {key}, or say launch --servers-only there and launch --learner-only here",
        ) from exc
