"""The GPUs that a process sees.

Devices of a configuration are taken out of those that the environment leaves visible. A device that is named
and not there is refused: torch would fall back to the CPU, or to fewer, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swift_stage2.errors import ConfigError, UserError

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def require_visible_devices(environment: Mapping[str, str], num_found: int) -> None:
    """Refuses an environment that names more devices than torch found; naming none is fine. Raises UserError."""
    if num_found < len(_visible(environment)):
        raise UserError(
            "every device that is named must exist on this machine",
            got=f"{_VARIABLE}={environment[_VARIABLE]} and {num_found} device(s) that torch can use",
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
    if _VARIABLE not in environment:
        return ",".join(map(str, devices))
    visible = _visible(environment)
    chosen = []
    for device in devices:
        if device not in (visible if isinstance(device, str) else range(len(visible))):
            raise ConfigError(
                f"{key} must be GPUs that {_VARIABLE} leaves visible to launch",
                got=f"{device} and {_VARIABLE}={environment[_VARIABLE]}, {len(visible)} device(s)",
                remedy="numbers count them from 0, names must stand in it: correct devices, or the variable",
            )
        chosen.append(device if isinstance(device, str) else visible[device])
    return ",".join(chosen)


def _visible(environment: Mapping[str, str]) -> list[str]:
    named = [word.strip() for word in environment.get(_VARIABLE, "").split(",")]
    if "-1" in named:  # CUDA reads the list up to there
        named = named[: named.index("-1")]
    return [word for word in named if word]
