"""Who has which device, and the part of its memory that each server on vLLM takes there (``launch.share_devices``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from swift_stage2.config.launch import LaunchConfig, ServerEngine, ServerProcess
from swift_stage2.errors import ConfigError

UTILIZATION = "vllm_gpu_memory_utilization"
"""Argument of a server on vLLM: the part of each of its devices that it takes."""
_VLLMS_OWN = 0.9


class Placement(NamedTuple):
    """The devices of one process. Devices are numbered host by host."""

    server: int | None
    """Its number in ``launch.servers``; None is the learner."""
    host: str
    devices: Sequence[int | str]

    @property
    def name(self) -> str:
        return "learner" if self.server is None else f"servers[{self.server}]"


def check_devices(launch: LaunchConfig, placements: Iterable[Placement]) -> None:
    """Checks that each process may have the devices it names.

    Raises:
        ConfigError: two share one without ``launch.share_devices``, a part is no number up to 1, the parts of a shared
            one are not stated or too much together, or a stock server is on rank 0's, where NCCL cannot reach it.
    """
    for number, server in enumerate(launch.servers):
        share_of(server, f"launch.servers[{number}].args")
    users: dict[tuple[str, int | str], list[Placement]] = {}
    for placement in placements:
        for device in placement.devices:
            users.setdefault((placement.host, device), []).append(placement)
    for (_, device), who in users.items():
        if len(who) > 1 and not launch.share_devices:
            raise ConfigError(
                f"launch: learner and servers need devices of their own, got device {device} for both {who[0].name} "
                f"and {who[1].name}; give each its own, or write launch.share_devices: true"
            )
        if len(who) > 1:
            _refuse_stock_beside_rank_0(launch, device, who)
            _check_shares(launch, device, who)


def share_of(server: ServerProcess, place: str = "launch.servers[].args") -> float | None:
    """The part that a server on vLLM states; None where it states none, or takes what it needs (transformers).

    ``place``: where it stands in the file.

    Raises:
        ConfigError: it is no part.
    """
    if server.engine is ServerEngine.TRANSFORMERS:
        return None
    args = {name.lstrip("-").replace("-", "_"): value for name, value in server.args.items()}
    share = args.get(UTILIZATION)
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if share is not None and not (is_number and 0 < share <= 1):
        raise ConfigError(
            f"{place}.{UTILIZATION} must be a number above 0 and at most 1, got {UTILIZATION}={share!r}; "
            f"write it like {UTILIZATION}: 0.4"
        )
    return share


def even_share(num_users: int, taken: float = 0.0) -> float:
    """A part for each of so many processes, of what ``taken`` leaves; two digits, rounded down."""
    return int(100 * (1 - taken) / num_users + 1e-6) / 100


def _refuse_stock_beside_rank_0(launch: LaunchConfig, device: int | str, who: Sequence[Placement]) -> None:
    has_rank_0 = any(each.server is None and each.devices[0] == device for each in who)
    for each in who if has_rank_0 else ():
        if each.server is not None and launch.servers[each.server].engine is ServerEngine.SWIFT:
            raise ConfigError(
                "weights reach a stock server over NCCL, which refuses two members on one device, got device "
                f"{device} for the learner's rank 0 and {each.name} with engine='swift'; write engine: vllm or "
                "transformers, which read the learner's memory, or give it another device"
            )


def _check_shares(launch: LaunchConfig, device: int | str, who: Sequence[Placement]) -> None:
    servers = {each.name: launch.servers[each.server] for each in who if each.server is not None}
    shares = {name: share_of(server, f"launch.{name}.args") for name, server in servers.items()}
    stated = {name: share for name, share in shares.items() if share is not None}
    total = round(sum(stated.values()), 6)
    shown = ", ".join(f"{share:g} of {name}" for name, share in stated.items())
    if total >= 1:
        raise ConfigError(
            f"the parts of device {device} must be below 1 together, got {UTILIZATION} {shown}: {total:g}; write "
            f"{UTILIZATION}: {even_share(len(who)):g} for each, or give one of them another device"
        )
    for name, server in servers.items():
        if name not in stated and server.engine is not ServerEngine.TRANSFORMERS:
            proposed = even_share(len(who) - len(stated), total)
            raise ConfigError(
                f"a server on vLLM must state its part of a device that it shares, got device {device} for "
                f"{' and '.join(each.name for each in who)} and no {UTILIZATION} in launch.{name}.args, so that vLLM "
                f"would take {_VLLMS_OWN:g}{f' beside {shown}' if stated else ''}; write {UTILIZATION}: {proposed:g}"
            )
