"""The plan of one optimizer step: its channel, and why not B where B was wanted.

Equal on every rank, because the gate's outcome is; the channel then holds for the whole accumulation window.
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
    """The channel that one optimizer step trains on."""

    channel: Channel
    skip_reason: SkipReason | None = None
    """None unless channel B was wanted and could not run."""

    @property
    def wanted_b(self) -> bool:
        return self.channel is Channel.B or self.skip_reason is not None
