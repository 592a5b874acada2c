"""The last stages as functions of nothing but what they are given: rollout → target → segment, segments → pack.

Called by the pipeline, and by a replay with recorded rollouts; that both make the same packs is the point.
"""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.task import Task
from swift_stage2.records import Pack, Rollout, Segment, Target


def make_target(rollout: Rollout, prompt: PromptEncoding, encoder: Encoder, task: Task) -> Target:
    """One rollout corrected.

    Raises:
        SampleError, MatchingError: the sample cannot be used.
    """
    return task.correct(rollout, task.to_space(rollout.sample.truth, prompt.convert), encoder.tokenise)


def make_segment(
    rollout: Rollout, prompt: PromptEncoding, encoder: Encoder, task: Task
) -> tuple[Segment, Target]:
    """One rollout parsed, matched, corrected and encoded; and the target that the segment carries.

    Raises:
        SampleError, MatchingError: the sample cannot be used.
    """
    target = make_target(rollout, prompt, encoder, task)
    key = rollout.sample.key
    segment = encoder.encode_segment(
        rollout,
        prompt,
        target,
        closing_weight=task.closing_weight,
        sample_id=f"{key.epoch}:{key.position}:{key.index}",
    )
    return segment, target


def make_pack(pack_id: str, segments: Sequence[Segment], encoder: Encoder, capacity_tokens: int) -> Pack:
    """Segments as one batch, in the order given."""
    return Pack(
        pack_id=pack_id,
        version=min(segment.version for segment in segments),
        batch=encoder.collate(segments),
        keys=tuple(segment.key for segment in segments),
        num_tokens=sum(segment.num_tokens for segment in segments),
        num_supervised_tokens=sum(segment.num_supervised_tokens for segment in segments),
        capacity_tokens=capacity_tokens,
        quality=tuple(segment.quality for segment in segments),
    )
