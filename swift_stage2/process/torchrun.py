"""A rank and the torchrun that started it: the environment it was given, and its end when its torchrun has gone.

A torchrun that is killed cannot end its ranks, and they would train on, seen by nobody. Imports neither torch nor
ms-swift.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

import psutil

from swift_stage2.errors import UserError
from swift_stage2.process.route import is_loopback, local_address_towards

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_ADDRESS = "MASTER_ADDR"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_MAKES_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_JOIN_TIMEOUT_S = 10.0
_LONGEST_WAIT_S = 3600.0

logger = logging.getLogger(__name__)


def check_rank_environment(environment: Mapping[str, str]) -> None:
    """Refuses an environment that makes half a rank of this process.

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
    """Refuses a host that ranks on others cannot reach over gloo, which decisions travel over on every machine.

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
    if not is_loopback(address):
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
        if entry.family == socket.AF_INET and not is_loopback(entry.address)
    ]


class AgentWatch:
    """Ends a rank whose torchrun has gone, for as long as it is entered; enter it as early as may be.

    The rank gets the SIGTERM that torchrun would have sent, saves at the next step boundary, and is killed after its
    grace. A process that torchrun did not start is left alone: its parent may be a shell that it is meant to outlive.
    """

    def __init__(self, environment: Mapping[str, str], grace_s: float = 0.0) -> None:
        """``grace_s``: seconds from SIGTERM to SIGKILL. Set later, once there is something to save."""
        self.grace_s = grace_s
        self._thread: threading.Thread | None = None
        if _STARTED_BY_TORCHRUN in environment:
            self._thread = threading.Thread(target=self._watch, name="agent-watch", daemon=True)

    def __enter__(self) -> AgentWatch:
        """Raises UserError: the parent has gone while it was looked for."""
        if self._thread is not None:
            self._agent = _open_parent()
            self._ended = os.eventfd(0)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            os.eventfd_write(self._ended, 1)
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            os.close(self._agent)
            os.close(self._ended)

    def _watch(self) -> None:
        while not (ready := select.select([self._ended, self._agent], [], [], _LONGEST_WAIT_S)[0]):
            continue
        if self._ended in ready:
            return
        logger.error("torchrun has gone; this rank saves and ends within %g s", self.grace_s)
        os.kill(os.getpid(), signal.SIGTERM)
        if not select.select([self._ended], [], [], self.grace_s)[0]:
            os.kill(os.getpid(), signal.SIGKILL)


def _open_parent() -> int:
    parent = os.getppid()
    with suppress(ProcessLookupError):
        agent = os.pidfd_open(parent)
        if os.getppid() == parent:  # else the number may be another process's by now
            return agent
        os.close(agent)
    raise UserError(f"a rank ends with its torchrun, which has gone (process {parent}); start the run again")
