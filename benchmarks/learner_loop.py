"""What one learner did between the end of its warm-up and its last step, told alike for ours and for a peer. Pure.

Idle is the share of wall time in which the main thread neither ran on a core nor was ready to run without one. With one
torch thread it does all of a step's computing, so it is idle when it waits: for rollouts, weights, locks, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class LoopArm(StrEnum):
    """Whose loop, and whether steps wait for their rollouts."""

    OURS = "ours, asynchronous"
    PEER = "ms-swift GRPO, async_generate"
    OURS_INLINE = "ours, inline"
    PEER_INLINE = "ms-swift GRPO, inline"


ASYNCHRONOUS = (LoopArm.OURS, LoopArm.PEER)
INLINE_OF = {LoopArm.OURS: LoopArm.OURS_INLINE, LoopArm.PEER: LoopArm.PEER_INLINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoop:
    """One run after its warm-up. Seconds are sums over its steps."""

    arm: LoopArm
    num_steps: int
    seconds: float
    on_core: float
    queued: float
    """Ready to run without a core, which other programs had."""
    in_rollout: float
    """Main thread in a rollout call, or waiting for one."""
    in_push: float
    """Main thread in a push of weights or in a sync round."""
    num_rollout_steps: int
    """Steps that trained on rollouts; the others of ours trained channel A."""
    num_completions: int
    """Trained."""

    @property
    def idle_share(self) -> float:
        """0 to 1."""
        return 1 - (self.on_core + self.queued) / self.seconds

    @property
    def idle_share_less_queued(self) -> float:
        """The same of the time in which nobody else had its core: on a shared machine it says more."""
        return 1 - self.on_core / (self.seconds - self.queued)

    @property
    def steps_per_s(self) -> float:
        """As the clock on the wall says."""
        return self.num_steps / self.seconds

    @property
    def completions_per_s(self) -> float:
        """Trained."""
        return self.num_completions / self.seconds

    @property
    def step_s_without_rollouts(self) -> float:
        """Mean seconds of a step less what it was in rollouts."""
        return (self.seconds - self.in_rollout) / self.num_steps


def share_of_bound(loop: LearnerLoop, inline: LearnerLoop, *, less_queued: bool = False) -> float:
    """Steps/s of ``loop`` over those that the same learner would have if rollouts took no time, by its inline run.

    ``less_queued``: as if nobody had ever waited for a core, which on a shared machine says more.
    """
    bound_s = inline.step_s_without_rollouts - less_queued * inline.queued / inline.num_steps
    step_s = (loop.seconds - less_queued * loop.queued) / loop.num_steps
    return bound_s / step_s


def loop_of(
    arm: LoopArm,
    clock: Mapping[str, Sequence[int]],
    num_warmup: int,
    *,
    in_rollout: float,
    in_push: float,
    num_rollout_steps: int,
    num_completions: int,
) -> LearnerLoop:
    """From a clock's nanoseconds at the end of every step; ``num_warmup`` is at least 1."""
    return LearnerLoop(
        arm=arm,
        num_steps=len(clock["end_ns"]) - num_warmup,
        seconds=since(clock, "end_ns", num_warmup),
        on_core=since(clock, "main_ns", num_warmup),
        queued=since(clock, "queued_ns", num_warmup),
        in_rollout=in_rollout,
        in_push=in_push,
        num_rollout_steps=num_rollout_steps,
        num_completions=num_completions,
    )


def since(clock: Mapping[str, Sequence[int]], column: str, num_warmup: int) -> float:
    """Seconds of a column after the warm-up."""
    return (clock[column][-1] - clock[column][num_warmup - 1]) / 1e9
