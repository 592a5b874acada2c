"""Bounds how far one rank asks ahead of training: how many rollouts it has begun under one version and still holds.

A rollout has a share of the version under which it was begun, from its draw on: while it is open, held, or packed. The
share comes back when the rollout is trained and when it ends in any other way. The pacer decides by forecasts when
rollouts are of use; this bound needs none. Pure: the sample source keeps the shares under its own lock.
"""

from __future__ import annotations

from collections.abc import Iterable

Place = tuple[int, int]
"""A sample's epoch and position."""


def most_samples(packing_length: int, shortest_prompt: int) -> int:
    """The most that a pack can hold, whatever its answers are; lengths in tokens, one sample at least.

    A budget of so many for each pack of a B step cannot be used up by fewer packs than that.
    """
    return max(1, packing_length // max(1, shortest_prompt))


class Shares:
    """The versions under which a rank's rollouts were begun, as long as each has its share."""

    def __init__(self) -> None:
        self._versions: dict[Place, int] = {}

    def num_held(self, version: int) -> int:
        """Rollouts that were begun under ``version`` and are neither trained nor ended."""
        return sum(begun_under == version for begun_under in self._versions.values())

    def num_left(self, version: int, budget: int) -> int:
        """How many rollouts may still be begun under ``version``; never fewer than none."""
        return max(0, budget - self.num_held(version))

    def begin(self, places: Iterable[Place], version: int) -> None:
        self._versions.update(dict.fromkeys(places, version))

    def end(self, places: Iterable[Place]) -> None:
        """Their rollouts were trained, or have ended otherwise; those without a share are passed over."""
        for place in places:
            self._versions.pop(place, None)
