"""What the pacer answers: how many packs to make now and why, and whether production can keep up at all.

Made by the pacer, acted on by the pipeline, logged by the learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PacingReason(StrEnum):
    """Why the pacer asks for packs, or for none."""

    NEEDED = "needed"
    """They will be fresh at the wanted step that lacks them."""
    NOT_MEASURED = "not_measured"
    """Nobody knows yet how long a production takes; making some tells."""
    CATCHING_UP = "catching_up"
    """This rank missed wanted steps in a row, so the forecast is not trusted."""
    LAST_CALL = "last_call"
    """A production that started a step later would miss the wanted step."""
    PRODUCTION_BINDS = "production_binds"
    """Production is slower than the need, so it does not idle between rounds."""
    TARGET_MET = "target_met"
    """The packs at hand and in the making are enough."""
    TOO_EARLY = "too_early"
    """A pack made now would be stale when its step comes."""
    CHANNEL_B_OFF = "channel_b_off"


@dataclass(frozen=True, slots=True)
class PacingDecision:
    """How many packs to make now (0: none) and why."""

    num_packs: int
    reason: PacingReason


@dataclass(frozen=True, slots=True)
class PacingVerdict:
    """What production can give against what the schedule needs, in packs per step on this rank."""

    made_per_step: float
    needed_per_step: float

    @property
    def load(self) -> float:
        """The share of its time that production must work to meet the need; over 1 it cannot."""
        return self.needed_per_step / self.made_per_step

    @property
    def binds(self) -> bool:
        """Whether production, not the schedule, decides how often channel B runs."""
        return self.load > 1

    def __str__(self) -> str:
        rates = f"{self.made_per_step:.2f} packs per step can be made, {self.needed_per_step:.2f} are needed"
        if not self.binds:
            return f"production keeps up: {rates}"
        return (
            f"production binds: {rates}, so at most {1 / self.load:.0%} of the wanted "
            "B steps can run; add rollout servers, shorten rollouts or lower b_ratio"
        )
