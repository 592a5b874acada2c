"""The setting of one simulated run, and the counts that the run returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: what the configuration says and how slow the servers are."""

    durations: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """Per rank, the shortest and longest rollout, in steps."""
    num_servers: int = 0
    """All ranks share so many, and the places of each; 0: each has one of its own."""
    window: int = 2
    target: int = 4
    b_ratio: float = 0.25
    packs_per_b_step: int = 4
    sync_every_steps: int = 1
    packs_per_request: int = 4
    rollouts_per_pack: int = 1
    places: int = 0
    """POSTs of one rollout that may be out at once; 0: a POST at a time carries a whole request."""
    num_slow_servers: int = 0
    """So many of the shared ones, the first, take twice as long for a rollout."""
    num_generations: int = 1
    """Rollouts of a group, which are packed when all are there, or at the last call before new weights."""
    tail: tuple[float, float] = (0.0, 1.0)
    """The share of rollouts that take so many times as long."""
    queue_limit: int = 8
    num_steps: int = 400
    seed: int = 0
    pipeline_delay: float = 1 / 64
    """Steps from the start of a step to the pipeline's turn; with 0, rollouts of whole steps end at a step start."""
    outage: tuple[int, int] = (0, 0)
    """Steps between which no server answers a new POST."""
    staged: bool = True
    """Whether the servers are asked on while new weights arrive; else they are drained for them."""
    travel_steps: tuple[float, float] = (0.3, 0.3)
    """The shortest and longest time that weights travel to all servers, in steps."""


@dataclass(slots=True)
class Outcome:
    """The counts of one run."""

    steps: int = 0
    wanted: int = 0
    ran: int = 0
    made: int = 0
    expired: int = 0
    versions: int = 0
    stale_trained: int = 0
    longest_gap: int = 0
    most_steps_between_versions: int = 0
    drawn: Counter[bool] = field(default_factory=Counter)
    """Rollouts, by whether they are of the tail."""
    lost: Counter[bool] = field(default_factory=Counter)
    """Those that became too old, or that their group did not wait for."""
    decisions: int = 0
    """Times a pacer was asked."""
    decision_s: float = 0.0
    """Seconds of a core for that."""

    @property
    def expired_share(self) -> float:
        return self.expired / max(1, self.made)
