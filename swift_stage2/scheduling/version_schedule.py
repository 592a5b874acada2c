"""Decides when the learner's weights become a new version; alike on all ranks, fed only with agreed facts.

A version is a number for the weights of one moment and is never used twice: one that no server proves leaves a gap, so
that run and version say everything of an answer's weights. Holds no thread, socket or collective.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_CADENCES = 16


@dataclass(slots=True)
class VersionSchedule:
    """A version every ``sync_every_steps`` steps, as long as a server can take it; sooner for one that waits, later
    where it would make stale what is at hand."""

    sync_every_steps: int
    most_cadences: int = MOST_CADENCES
    begun: int = 0
    """The version that was begun last; 0 before the first."""
    begun_step: int | None = None
    """From which the cadence counts: that version's, or the last at which it kept all servers from being asked."""
    is_asked_for: bool = False
    """Whether one is wanted out of turn, and has not begun."""
    pending_step: int | None = None
    """The step at which one fell due that has not begun yet."""

    @property
    def next_version(self) -> int:
        return self.begun + 1

    @property
    def most_steps(self) -> int:
        """From one version to the next, as far as what is at hand decides: 16 times ``sync_every_steps``."""
        return self.most_cadences * self.sync_every_steps

    def comes_within(self, num_steps: int, step: int) -> bool:
        """Whether the schedule forces the next version at most ``num_steps`` after ``step``."""
        return self.begun_step is not None and step + num_steps >= self.begun_step + self.most_steps

    def is_due(self, step: int, *, any_proven: bool, server_waits: bool, makes_stale: bool = False) -> bool:
        """Whether a version should begin at the start of ``step``; it stays pending until it begins.

        ``server_waits``: a server could take weights and no version that is kept would do. ``makes_stale``: a rank has
        rollouts in flight, or waits with some for a B step, that would be too old for training then.
        """
        least = self.most_steps if makes_stale else self.sync_every_steps
        is_time = self.begun_step is None or step - self.begun_step >= least
        is_due = server_waits or (any_proven and (is_time or self.is_asked_for))
        if not is_due:
            self.pending_step = None
        elif self.pending_step is None:
            self.pending_step = step
        return is_due

    def begin(self, step: int) -> int:
        """A version of the weights at the start of ``step`` begins. Returns its number."""
        self.begun, self.begun_step = self.begun + 1, step
        self.is_asked_for, self.pending_step = False, None
        return self.begun

    def hold(self, step: int) -> None:
        """At ``step`` no server could be asked, because this version comes: they shall be asked for as long."""
        self.begun_step = step
