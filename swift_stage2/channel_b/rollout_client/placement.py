"""How many samples of a batch each server gets, from how fast it has been. Pure.

A batch goes to as few servers as hold it, so that engines are full; among those it is split by pace. Servers that are
about as fast as the best take turns, because ranks that all ran after the fastest would meet there. Called by the
client before each batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_NEWEST = 0.3  # weight of the latest batch in the pace
_FORGET_AFTER = 32  # batches: a server that was left out for so long is tried again
_ABOUT_AS_FAST = 1.5
# A larger batch makes an engine look faster, which in full proportion would feed itself; 5 % off at twice the pace.
_CAUTION = 0.9


@dataclass(frozen=True, slots=True)
class ServerPace:
    """Prompts per second of one server as this rank has seen it; without history None."""

    prompts_per_s: float | None = None
    last_batch: int = 0  # number of the batch that it was last part of

    def after(self, num_prompts: int, seconds: float, batch: int) -> ServerPace:
        """With one more share: ``num_prompts`` answered in ``seconds`` of POSTs; an empty one shows nothing."""
        if num_prompts < 1 or seconds <= 0:
            return ServerPace(self.prompts_per_s, batch)
        pace = num_prompts / seconds
        if self.prompts_per_s is not None:
            pace = (1 - _NEWEST) * self.prompts_per_s + _NEWEST * pace
        return ServerPace(pace, batch)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What placement knows of one server."""

    pace: ServerPace
    in_flight: int = 0  # prompts of this rank that it may still be computing


def place(
    num_samples: int, servers: Sequence[ServerLoad], *, full_share: int, turn: int, batch: int
) -> tuple[int, ...]:
    """Samples for each of ``servers``, in their order; together ``num_samples``.

    Uses ``ceil(num_samples / full_share)`` servers as far as there are. ``turn`` says with which of the equally good
    ones to begin; ``batch`` numbers the batches. A server without history counts as fast as the fastest known.

    Raises:
        ValueError: ``full_share`` < 1, a negative count, or samples for no server.
    """
    if full_share < 1 or num_samples < 0 or (num_samples and not servers):
        raise ValueError(
            f"placement needs full_share >= 1 and servers for its samples, got full_share={full_share} "
            f"num_samples={num_samples} num_servers={len(servers)}"
        )
    if not num_samples:
        return (0,) * len(servers)
    paces = _known_paces(servers, batch)
    chosen = _choose(min(len(servers), math.ceil(num_samples / full_share)), servers, paces, full_share, turn)
    weights = [paces[n] ** _CAUTION for n in chosen]
    busy = [float(servers[n].in_flight) for n in chosen]
    sizes = dict(zip(chosen, _in_proportion(num_samples, weights, busy), strict=True))
    return tuple(sizes.get(n, 0) for n in range(len(servers)))


def as_slices(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    bounds = [0, *accumulate(sizes)]
    return [slice(start, start + size) for start, size in zip(bounds, sizes, strict=False)]


def _known_paces(servers: Sequence[ServerLoad], batch: int) -> list[float]:
    known = [
        load.pace.prompts_per_s if batch - load.pace.last_batch <= _FORGET_AFTER else None for load in servers
    ]
    fastest = max((pace for pace in known if pace is not None), default=1.0)
    return [fastest if pace is None else pace for pace in known]


def _choose(
    num_chosen: int, servers: Sequence[ServerLoad], paces: Sequence[float], full_share: int, turn: int
) -> list[int]:
    """Those that would end a full share first; those about as good take turns."""
    ends = [(load.in_flight + full_share) / pace for load, pace in zip(servers, paces, strict=True)]
    good_enough = min(ends) * _ABOUT_AS_FAST
    in_turn = [(turn + n) % len(servers) for n in range(len(servers))]
    return sorted(in_turn, key=lambda n: max(ends[n], good_enough))[:num_chosen]


def _in_proportion(total: int, weights: Sequence[float], busy: Sequence[float]) -> list[int]:
    """Sizes so that ``(busy + size) / weight`` is as equal as can be; at least 1 each while there is enough."""
    least = 1 if total >= len(weights) else 0
    sizes = [least] * len(weights)
    for _ in range(total - sum(sizes)):
        best = min(range(len(weights)), key=lambda n: ((busy[n] + sizes[n] + 1) / weights[n], n))
        sizes[best] += 1
    return sizes
