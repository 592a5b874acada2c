"""A rank and the torchrun that started it: the environment it was given, and its end when its torchrun has gone.

Imports neither torch nor ms-swift.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from swift_stage2.errors import UserError
from swift_stage2.runtime.network import is_loopback, resolve

_ADDRESS = "MASTER_ADDR"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_GRACE_S = 300.0  # to save a checkpoint
_LONGEST_WAIT_S = 3600.0

logger = logging.getLogger(__name__)


def check_gloo_address(environment: Mapping[str, str]) -> None:
    """Refuses a host that ranks on others cannot reach over gloo, which decisions travel over on every machine.

    Raises:
        UserError: several hosts, no interface named, and gloo would take an address that no other host reaches.
    """
    master = environment.get(_ADDRESS, "localhost")
    is_one_host = environment.get("LOCAL_WORLD_SIZE") in (None, environment.get("WORLD_SIZE"))
    if is_one_host or is_loopback(master) or environment.get(_INTERFACE):
        return
    if is_loopback(address := _address_gloo_takes()):
        names = ", ".join(
            f"{_INTERFACE}={name} ({entry.address})"
            for name, entries in psutil.net_if_addrs().items()
            for entry in entries
            if entry.family == socket.AF_INET and not is_loopback(entry.address)
        )
        raise UserError(
            "ranks on several hosts talk over gloo, which takes the address of this host's name",
            got=f"{socket.gethostname()} = {address}, which no other host reaches",
            remedy=f"set {names} in this host's environment",
        )


def _address_gloo_takes() -> str:
    """The first address of this host's name that can be bound, else loopback: as PyTorch chooses it."""
    with suppress(OSError):
        found = resolve(socket.gethostname())
        for family, kind, protocol, _, address in found:
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def end_with_torchrun(environment: Mapping[str, str]) -> None:
    """From now on ends this rank when its torchrun has gone, which, killed, ends no rank; call it as early as may be.

    The rank gets the SIGTERM that torchrun would have sent, saves at the next step boundary, and is killed after its
    grace. A process that torchrun did not start is left alone: its parent may be a shell that it is meant to outlive.
    """
    if _STARTED_BY_TORCHRUN in environment:
        agent = os.pidfd_open(os.getppid())
        threading.Thread(target=_end_after, args=(agent,), name="torchrun-watch", daemon=True).start()


def _end_after(agent: int) -> None:
    while not select.select([agent], [], [], _LONGEST_WAIT_S)[0]:
        continue
    logger.error("torchrun has gone; this rank saves and ends within %g s", _GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
