"""The route to another machine's port: our own address on it, whether anything listens there, and what to mend.

No call of any protocol is made: a connection is opened and closed. Imports no torch.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from swift_stage2.runtime.background import BackgroundCall

_RESOLVE_TIMEOUT_S = 5.0
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH)


def why_deaf(base_url: str, timeout_s: float) -> str:
    """Why no connection to the URL's host and port opens within the time, and a remedy; empty when one does."""
    parts = urlsplit(base_url)
    error = connection_error(parts.hostname or "", parts.port or 0, timeout_s)
    return f"{error}; {http_remedy(error)}" if error else ""


def connection_error(host: str, port: int, timeout_s: float) -> OSError | None:
    """The error that ends an attempt to connect; None when one succeeds."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return error
    return None


def local_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to ``host``; a datagram socket finds it without sending anything.

    Raises:
        OSError: the name is not known here, or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def addresses_of(host: str, port: int) -> list[str] | str:
    """IP addresses, or why there are none; a resolver that hangs is given up."""
    call = BackgroundCall(
        lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), name=f"resolve {host}"
    )
    if not call.ended_within(_RESOLVE_TIMEOUT_S):
        return f"no answer from the resolver within {_RESOLVE_TIMEOUT_S:g} s"
    try:
        return [str(info[4][0]) for info in call.result_within(0.0)]
    except (OSError, UnicodeError) as error:
        return str(error)


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own, at which no other host reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def http_remedy(error: OSError) -> str:
    """The remedy when a rollout server's HTTP port cannot be connected to."""
    closed = "start the server there, with a --host that this machine reaches"
    return _remedy(
        error,
        "the host of base_url",
        closed,
        "check scheme, host and port of base_url",
        "the port of base_url",
    )


def group_remedy(error: OSError) -> str:
    """The remedy when the port for weights cannot be connected to."""
    closed = "nothing listens there: group_bind must be the address that group_host leads to, and group_port free there"
    other = "another program may hold group_port there: choose another one"
    return _remedy(
        error, "rollout.servers[].group_host (else the host of base_url)", closed, other, "group_port"
    )


def _remedy(error: OSError, host: str, closed: str, other: str, port: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"write {host} as a name or address that this machine knows"
    if isinstance(error, ConnectionRefusedError):
        return closed
    if error.errno in _NO_ROUTE:
        return f"this machine has no route there, or a firewall rejects it: write {host} as an address that it reaches"
    if isinstance(error, TimeoutError):
        return f"nothing comes back: open {port} in every firewall between the two machines"
    return other
