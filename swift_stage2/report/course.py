"""What a run was set to and what happened on its way: the facts that advice is computed from, beside times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The present settings, None where the run did not write them down."""

    b_ratio: float | None
    sync_every_steps: int | None
    version_window: int | None
    num_servers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What happened on the way."""

    num_steps: int
    num_b_wanted: int
    num_b_run: int
    skips: Mapping[str, int]
    num_stale: int
    """Packs and segments that left the window untrained."""
    num_rounds: int
    num_servers_failed: int
    """How often a round could not prove a server."""
    main_server_error: str | None
    post_steps: tuple[float, float] | None
    """Lower and upper decile of what a POST takes, in steps; None without POSTs."""
    unused: str = ""
    """Why channel B was wanted and never ran; empty when all is well."""
