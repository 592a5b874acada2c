"""Turns "B is wanted" and "every rank reserved" into the plan of one optimizer step.

The plan is the same on every rank, because both inputs are. Called by the learner right after the
step's all-reduce; the channel then holds for the whole accumulation window.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Channel(StrEnum):
    """Where the batches of one optimizer step come from."""

    A = "A"
    """The main dataloader."""
    B = "B"
    """The ready queue."""


class SkipReason(StrEnum):
    """Why a wanted channel-B step ran on channel A."""

    NOT_ENOUGH_PACKS = "not_enough_packs"
    """Some rank had fewer fresh packs (or supervised tokens) than the step needs."""
    TRUNCATION_GUARD = "truncation_guard"
    """Too many rollouts are cut off; training on them is paused."""
    SERVERS_SUSPECT = "servers_suspect"
    """No proven rollout server is left and the queue has run dry."""
    PIPELINE_FAILED = "pipeline_failed"
    """A background pipeline died and the run goes on with channel A."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one optimizer step trains on."""

    channel: Channel
    skip_reason: SkipReason | None = None
    """None unless channel B was wanted and could not run."""

    @property
    def wanted_b(self) -> bool:
        """Whether the schedule asked for channel B."""
        return self.channel is Channel.B or self.skip_reason is not None


def plan_step(
    *,
    wants_b: bool,
    reserved_everywhere: bool,
    skip_reason: SkipReason = SkipReason.NOT_ENOUGH_PACKS,
) -> StepPlan:
    """Plan one step: B iff it is wanted and every rank holds a reservation.

    ``skip_reason`` is the cause to report if a wanted B cannot run; it decides nothing.
    """
    if not wants_b:
        return StepPlan(Channel.A)
    if reserved_everywhere:
        return StepPlan(Channel.B)
    return StepPlan(Channel.A, skip_reason)
