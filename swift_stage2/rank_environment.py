"""Refuses a half-set torchrun environment with one line, before torch or ms-swift stumble over it."""

from __future__ import annotations

from collections.abc import Mapping

from swift_stage2.errors import UserError

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_ADDRESS = "MASTER_ADDR"
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
