"""Refuses GPUs that are named and not there: torch would fall back to the CPU, or to fewer, without a word."""

from __future__ import annotations

from collections.abc import Mapping

from swift_stage2.errors import UserError

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def require_visible_devices(environment: Mapping[str, str], num_found: int) -> None:
    """Whether torch found (``num_found``) as many devices as the environment names; naming none is fine.

    Raises:
        UserError: fewer are there.
    """
    named = [word.strip() for word in environment.get(_VARIABLE, "").split(",")]
    if "-1" in named:  # CUDA reads the list up to there
        named = named[: named.index("-1")]
    num_named = sum(bool(word) for word in named)
    if num_found < num_named:
        raise UserError(
            f"every device that is named must exist on this machine, got {_VARIABLE}={environment[_VARIABLE]} and "
            f"{num_found} device(s) that torch can use; write numbers of GPUs that exist under launch (devices: [], "
            "with swift.use_cpu: true for the learner, means CPU), or correct the variable"
        )
