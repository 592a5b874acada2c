"""The environment of a process: torchrun's, and the GPUs that it may see. Imports neither torch nor ms-swift.

Devices of a configuration are taken out of those that the environment leaves visible. A device that is named and not
there is refused: torch would fall back to the CPU, or to fewer, without a word. A rank ends when its torchrun has gone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from swift_stage2.errors import ConfigError, UserError
from swift_stage2.runtime.network import is_loopback, resolve

_DEVICES = "CUDA_VISIBLE_DEVICES"
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, the same under WSL, ROCm's


def has_gpu_driver() -> bool:
    """True if a GPU driver is loaded on this host; a login node has none. Torch may find no GPU all the same."""
    return any(map(os.path.exists, _DRIVERS))


def require_visible_devices(environment: Mapping[str, str], num_found: int) -> None:
    """Refuses an environment that names more devices than torch found; naming none is fine. Raises UserError."""
    if num_found < len(_visible(environment)):
        raise UserError(
            "every device that is named must exist on this machine",
            got=f"{_DEVICES}={environment[_DEVICES]} and {num_found} device(s) that torch can use",
            remedy="write numbers of GPUs that exist under launch (devices: [], with swift.use_cpu: true for "
            "the learner, means CPU), or correct the variable",
        )


def require_known_accelerator(kind: str | None) -> None:
    """Refuses any accelerator but CUDA: transports, proofs and memory are written for that. Raises UserError.

    ``kind`` is the type of device that torch would compute on, e.g. ``cuda`` or ``npu``; None means the CPU.
    """
    if kind not in (None, "cuda"):
        raise UserError(
            "devices must be GPUs that torch knows as CUDA (NVIDIA, ROCm), or the CPU",
            got=kind,
            remedy="train with swift.use_cpu: true and serve with --device cpu, or use a machine with such GPUs",
        )


def select_devices(environment: Mapping[str, str], devices: Sequence[int | str], key: str) -> str:
    """The CUDA_VISIBLE_DEVICES of a process that is given ``devices``.

    As everywhere in CUDA a number counts the devices that ``environment`` leaves visible, whose names (``GPU-…``,
    ``MIG-…``) are kept as they are written. ``key`` says where the devices are configured.

    Raises:
        ConfigError: a device that the environment does not leave visible.
    """
    if _DEVICES not in environment:
        return ",".join(map(str, devices))
    visible = _visible(environment)
    chosen = []
    for device in devices:
        if device not in (visible if isinstance(device, str) else range(len(visible))):
            raise ConfigError(
                f"{key} must be GPUs that {_DEVICES} leaves visible to launch",
                got=f"{device} and {_DEVICES}={environment[_DEVICES]}, {len(visible)} device(s)",
                remedy="numbers count them from 0, names must stand in it: correct devices, or the variable",
            )
        chosen.append(device if isinstance(device, str) else visible[device])
    return ",".join(chosen)


def _visible(environment: Mapping[str, str]) -> list[str]:
    named = [word.strip() for word in environment.get(_DEVICES, "").split(",")]
    if "-1" in named:  # CUDA reads the list up to there
        named = named[: named.index("-1")]
    return [word for word in named if word]


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
