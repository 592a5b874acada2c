"""Everything that flows through channel B, in flow order: sample, rollout, prediction, match, target, segment, pack.

All records are frozen; a stage turns one into the next and never edits what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_stage2.channel_b.image_files import image_paths

Box = tuple[float, float, float, float]
IntegerBox = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Where a sample stands in one rank's stream. ``attempt`` counts rollouts asked for, from 0."""

    epoch: int
    position: int  # within this rank's shard of the epoch
    index: int  # row in the data set
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of the data set: the prompt, its images, and what its answer should say."""

    key: SampleKey
    row: Mapping[str, Any]  # as the data set gives it; never changed
    truth: Any = None  # as the task read it

    @property
    def image_paths(self) -> tuple[str | None, ...]:
        """Absolute paths of its images; None for one that has no file of its own."""
        return image_paths(self.row)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Token positions ``start <= i < end`` of a rollout that were sampled under ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the model said to one sample, and under which weights."""

    sample: Sample
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    truncated: bool  # the server stopped it at max_new_tokens
    seed: int  # its POST's, or its own where a merger stamped it
    server: str
    spans: tuple[VersionSpan, ...]
    log_probs: tuple[float, ...] | None = None
    seconds: float = 0.0

    @property
    def version(self) -> int:
        """The oldest version that any of its tokens was sampled under."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class MatchQuality:
    """Counts of one rollout against its ground truth, for the ``match/`` and ``parse/`` metrics."""

    num_predictions: int
    num_ground_truth: int
    num_pairs: int
    sum_iou: float
    num_gated: int
    num_truncated: int  # 0 or 1
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectMatch:
    """What a rollout found and what there was, in the template's coordinate space; for whoever looks at it later."""

    predicted: tuple[tuple[str, IntegerBox], ...]
    truth: tuple[tuple[str, IntegerBox], ...]
    pairs: tuple[tuple[int, int, float], ...]  # prediction, truth, IoU


@dataclass(frozen=True, slots=True)
class Target:
    """The corrected answer to one rollout, tokenised once as a whole."""

    text: str
    token_ids: tuple[int, ...]
    weights: tuple[float, ...]  # one per token, for ``loss_scale``
    quality: MatchQuality
    match: ObjectMatch | None = None  # None of a task without boxes
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The task's own: an amount, and out of how much. An evaluation divides the sums of both."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One encoded sample, ready to be packed. ``encoding`` is what the template's collator takes."""

    key: SampleKey
    sample_id: str
    version: int
    encoding: Mapping[str, Any]
    num_tokens: int
    num_supervised_tokens: int
    num_rollout_tokens: int
    quality: MatchQuality


@dataclass(frozen=True, slots=True)
class Pack:
    """One collated batch, trained in one micro_step. Its version is its oldest segment's."""

    pack_id: str
    version: int
    batch: Mapping[str, Any]
    keys: tuple[SampleKey, ...]
    num_tokens: int
    num_supervised_tokens: int
    capacity_tokens: int
    quality: tuple[MatchQuality, ...] = ()

    @property
    def fill_ratio(self) -> float:
        """Share of ``packing_length`` that carries tokens."""
        return self.num_tokens / self.capacity_tokens
