"""Placement of requests: which server gets the next ones, and how many it gets at once. Pure.

Requests go where they would end first, by what a server has in hand and by its pace. Servers that are about as fast as
the best count alike and take turns, because ranks that all ran after the fastest would meet there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_stage2.channel_b.rollouts.requests import PostEnd

_NEWEST = 0.3  # weight of the latest answer in the pace
_FORGET_AFTER = 32  # submissions: a server that was left out for so long is tried again
_ABOUT_AS_FAST = 1.5
# A larger batch makes an engine look faster, which in full proportion would feed itself; 5 % off at twice the pace.
_CAUTION = 0.9


@dataclass(frozen=True, slots=True)
class ServerPace:
    """Prompts per second of one server as this rank has seen it; without history None."""

    prompts_per_s: float | None = None
    last_share: int = 0  # number of the share that it got last

    def after(self, num_prompts: int, seconds: float) -> ServerPace:
        """With one more share: ``num_prompts`` answered in ``seconds`` of POSTs; an empty one shows nothing."""
        if num_prompts < 1 or seconds <= 0:
            return self
        pace = num_prompts / seconds
        if self.prompts_per_s is not None:
            pace = (1 - _NEWEST) * self.prompts_per_s + _NEWEST * pace
        return replace(self, prompts_per_s=pace)


def choose(
    paces: Sequence[ServerPace], in_hand: Sequence[int], sizes: Sequence[int], *, share: int, turn: int
) -> int:
    """Which server gets the share of number ``share``; the n-th would get ``sizes[n]`` prompts.

    It has ``in_hand[n]`` prompts of this rank that it computes or that wait for it. ``turn`` says with which of the
    equally good ones to begin. A server without history counts as fast as the fastest.

    Raises:
        ValueError: there is no server.
    """
    if not paces:
        raise ValueError("a share needs a server, got num_servers=0")
    known = [pace.prompts_per_s if share - pace.last_share <= _FORGET_AFTER else None for pace in paces]
    fast_enough = max((pace for pace in known if pace is not None), default=1.0) / _ABOUT_AS_FAST
    ends = [
        (held + size) / (fast_enough if pace is None else min(pace, fast_enough)) ** _CAUTION
        for held, size, pace in zip(in_hand, sizes, known, strict=True)
    ]
    return min(range(len(paces)), key=lambda n: (ends[n], (n - turn) % len(paces)))


class PlaceLimit:
    """The requests that a server gets at once, in a POST each or together: one more per full set answered, half when
    it had no room or time."""

    def __init__(self) -> None:
        self._limit = math.inf
        self._cut_s = -math.inf

    def within(self, most: int) -> int:
        """The limit now, between 1 and ``most``."""
        return max(1, int(min(most, self._limit)))

    def observe(
        self, end: PostEnd, *, began_s: float, ended_s: float, most: int, num_requests: int = 1
    ) -> None:
        """One POST ended. One that left before the last cut says nothing new of the server."""
        if end is PostEnd.ANSWERED:
            self._limit += num_requests / self.within(most)
        elif end in (PostEnd.BUSY, PostEnd.TIMED_OUT) and began_s >= self._cut_s:
            self._limit = self.within(most) / 2
            self._cut_s = ended_s
