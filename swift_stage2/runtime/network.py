"""Ports and addresses of this machine, and the route to another's: what is free, who holds it, what to mend.

No call of any protocol is made: a connection is opened and closed. Imports no torch.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import ExitStack, suppress
from typing import Any

import psutil

from swift_stage2.errors import ConfigError
from swift_stage2.runtime.background import BackgroundCall

ANY_ADDRESS = ("0.0.0.0", "::")
_RESOLVE_TIMEOUT_S = 5.0


def resolve(host: str, port: int = 0, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[Any]:
    """As ``socket.getaddrinfo``, on a thread of its own. Raises OSError, also where the resolver hangs."""
    call = BackgroundCall(lambda: socket.getaddrinfo(host, port, type=kind), name=f"resolve {host}")
    if not call.ended_within(_RESOLVE_TIMEOUT_S):
        raise TimeoutError(f"no answer from the resolver within {_RESOLVE_TIMEOUT_S:g} s")
    try:
        return call.result_within(0.0)
    except UnicodeError as error:
        raise OSError(str(error)) from error


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
        family, kind, protocol, _, address = resolve(host)[0]
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


def refuse_busy(host: str, port: int, key: str) -> None:
    """Checks one port; ``key`` is the one in the configuration that names it.

    Raises:
        ConfigError: the port is in use or closed to this user, or ``host`` is not this machine.
    """
    try:
        for number, told in enumerate(
            resolve(host, port)
        ):  # of a name with several a server may take any one
            family, kind, protocol, _, address = told
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as exc:
                if number == 0 or exc.errno == errno.EADDRINUSE:
                    raise
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


_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH)


def connection_error(host: str, port: int, timeout_s: float) -> OSError | None:
    """The error that ends an attempt to connect; None when one succeeds."""
    try:
        resolve(host, port)
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return error
    return None


def local_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host``; a datagram socket finds it without sending anything.

    Raises:
        OSError: the name is not known here, or there is no route.
    """
    family, kind, protocol, _, address = resolve(host, port, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own, at which no other host reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def http_remedy(error: OSError) -> str:
    """The remedy when a rollout server's HTTP port cannot be connected to."""
    closed = "start the server there, with a --host that this machine reaches"
    return _remedy(error, "the host of base_url", "the port of base_url", closed)


def group_remedy(error: OSError) -> str:
    """The remedy when the port for weights cannot be connected to."""
    closed = "nothing listens there: group_bind must be the address that group_host leads to, and group_port free there"
    return _remedy(error, "rollout.servers[].group_host (else the host of base_url)", "group_port", closed)


def _remedy(error: OSError, host: str, port: str, closed: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"write {host} as a name or address that this machine knows"
    if isinstance(error, ConnectionRefusedError):
        return closed
    if error.errno in _NO_ROUTE:
        return f"this machine has no route there, or a firewall rejects it: write {host} as an address that it reaches"
    if isinstance(error, TimeoutError):
        return f"nothing comes back: open {port} in every firewall between the two machines"
    return f"check {host} and {port}: another program may hold it"
