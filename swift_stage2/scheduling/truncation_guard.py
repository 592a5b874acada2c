"""Turns "was this rollout cut off" into "channel B pauses", with hysteresis.

The share of truncated rollouts among the last 256 pauses B above the limit and lifts the pause below
0.8 times the limit: training on cut-off answers makes a model worse. One writer (the rank's pipeline);
``paused`` is one attribute, safe to read from the main thread, and travels in the step's vector.
"""

from __future__ import annotations

from collections import deque

WINDOW_ROLLOUTS = 256
MIN_ROLLOUTS = 16  # a share over fewer rollouts says too little to stop a channel
LIFT_FACTOR = 0.8


class TruncationGuard:
    """Watches the moving share of truncated rollouts on one rank."""

    def __init__(self, max_truncated_ratio: float) -> None:
        if not 0 <= max_truncated_ratio <= 1:
            raise ValueError(
                "max_truncated_ratio is a share from 0 to 1, "
                f"got max_truncated_ratio={max_truncated_ratio!r}; 0.3 is the default, 1 never pauses"
            )
        self._limit = max_truncated_ratio
        self._recent: deque[bool] = deque(maxlen=WINDOW_ROLLOUTS)
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether channel B must pause."""
        return self._paused

    @property
    def truncated_ratio(self) -> float:
        """The share of truncated rollouts among the last 256; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def observe(self, truncated: bool) -> bool:
        """Take in one rollout; return whether channel B must pause from now on."""
        self._recent.append(bool(truncated))
        ratio = self.truncated_ratio
        if self._paused:
            # A limit of 0 has nothing below it: there a clean window lifts the pause.
            self._paused = ratio >= LIFT_FACTOR * self._limit if self._limit > 0 else ratio > 0
        elif len(self._recent) >= MIN_ROLLOUTS:
            self._paused = ratio > self._limit
        return self._paused
