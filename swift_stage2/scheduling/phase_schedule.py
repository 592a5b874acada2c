"""Decides when servers that share the learner's devices are woken; alike on all ranks, fed only with agreed facts.

A phase begins at a step that wants channel B and finds no packs of an earlier phase: a new version is brought to the
servers, packs for the next ``phase_steps`` wanted steps are made, and the servers sleep again before the step trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_stage2.scheduling.bresenham import wanted_count, wants_channel_b
from swift_stage2.scheduling.version_schedule import VersionSchedule


@dataclass(slots=True, kw_only=True)
class PhaseSchedule(VersionSchedule):
    """A version at the begin of every phase, and none between two."""

    b_ratio: float
    phase_steps: int
    num_steps: int
    """Of the whole run."""
    num_left: int = 0
    """Wanted steps before the next phase."""
    _has_fed: bool = False

    def comes_within(self, num_steps: int, step: int) -> bool:
        return False

    def is_due(self, step: int, *, any_proven: bool, server_waits: bool, makes_stale: bool = False) -> bool:
        opens = self.num_left == 0 and wants_channel_b(step, self.b_ratio)
        is_due = (opens or self.is_asked_for) and (any_proven or server_waits)
        self.pending_step = step if is_due else None
        return is_due

    def begin(self, step: int) -> int:
        num_wanted = wanted_count(self.num_steps, self.b_ratio) - wanted_count(step, self.b_ratio)
        self.num_left, self._has_fed = max(0, min(self.phase_steps, num_wanted)), False
        return VersionSchedule.begin(self, step)

    def observe(self, step: int, *, is_fed: bool) -> None:
        """``is_fed``: every rank has reserved its packs at ``step``.

        Packs that have run out begin the next phase early. One that fed no step at all has lasted as long as any
        other: what it lacked would most likely be lacking at the next step, and every switch costs time.
        """
        if not wants_channel_b(step, self.b_ratio):
            return
        has_run_out = self._has_fed and not is_fed
        self.num_left = 0 if has_run_out else max(0, self.num_left - 1)
        self._has_fed |= is_fed
