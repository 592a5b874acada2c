"""What telemetry reads of a step, a round, a rollout batch and a pack.

Protocols, because the modules that own those records import telemetry and not the other way round; the
records of the learner, the sync round and channel B satisfy them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class PlanFacts(Protocol):
    """What one step trains on. ``channel`` is "A" or "B"; ``skip_reason`` is one of ``SKIP_REASONS``."""

    @property
    def channel(self) -> str: ...

    @property
    def wanted_b(self) -> bool: ...

    @property
    def skip_reason(self) -> str | None: ...


class QualityFacts(Protocol):
    """Counts of one rollout against its ground truth."""

    @property
    def num_predictions(self) -> int: ...

    @property
    def num_ground_truth(self) -> int: ...

    @property
    def num_pairs(self) -> int: ...

    @property
    def sum_iou(self) -> float: ...

    @property
    def num_gated(self) -> int: ...

    @property
    def num_truncated(self) -> int: ...

    @property
    def dropped(self) -> Mapping[str, int]: ...


class KeyFacts(Protocol):
    """Where a sample stands in its rank's stream."""

    @property
    def epoch(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def attempt(self) -> int: ...


class SampleFacts(Protocol):
    """One sample. ``image_paths`` are absolute; None for an image that has no file of its own."""

    @property
    def key(self) -> KeyFacts: ...

    @property
    def image_paths(self) -> Sequence[str | None]: ...


class SpanFacts(Protocol):
    """Token positions ``start <= i < end`` that were sampled under ``version``."""

    @property
    def version(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


class RolloutFacts(Protocol):
    """What the model said to one sample."""

    @property
    def sample(self) -> SampleFacts: ...

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def spans(self) -> Sequence[SpanFacts]: ...


ObjectFacts = tuple[str, tuple[int, int, int, int]]
"""A label, and a box in the template's coordinate space."""


class MatchFacts(Protocol):
    """What a rollout found and what there was; ``pairs`` are prediction, truth, IoU."""

    @property
    def predicted(self) -> Sequence[ObjectFacts]: ...

    @property
    def truth(self) -> Sequence[ObjectFacts]: ...

    @property
    def pairs(self) -> Sequence[tuple[int, int, float]]: ...


class TargetFacts(Protocol):
    """The corrected answer. ``match`` is None of a task without boxes."""

    @property
    def text(self) -> str: ...

    @property
    def quality(self) -> QualityFacts: ...

    @property
    def match(self) -> MatchFacts | None: ...


class SegmentFacts(Protocol):
    """One encoded sample."""

    @property
    def key(self) -> KeyFacts: ...

    @property
    def version(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_rollout_tokens(self) -> int: ...

    @property
    def quality(self) -> QualityFacts: ...


class PackFacts(Protocol):
    """One collated batch of channel B; ``keys`` names its samples."""

    @property
    def pack_id(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def keys(self) -> Sequence[KeyFacts]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_supervised_tokens(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...


class StepFacts(Protocol):
    """One optimizer step of one rank, as its plan was made. ``version_lag`` is None on channel A."""

    @property
    def step(self) -> int: ...

    @property
    def plan(self) -> PlanFacts: ...

    @property
    def version(self) -> int: ...

    @property
    def version_lag(self) -> int | None: ...

    @property
    def queue_depth(self) -> int: ...

    @property
    def infer_in_flight(self) -> int: ...

    @property
    def round_pending(self) -> bool: ...

    @property
    def plan_seconds(self) -> float: ...

    @property
    def packs(self) -> Sequence[PackFacts]: ...


class ServerFacts(Protocol):
    """How one server fared in a round; ``seconds`` by phase."""

    @property
    def proven(self) -> bool: ...

    @property
    def error(self) -> str | None: ...

    @property
    def proof(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def seconds(self) -> Mapping[str, float]: ...


class RoundFacts(Protocol):
    """What every rank learns of a round; ``reports`` by index of the server in the configuration."""

    @property
    def round_id(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def canary_seconds(self) -> float: ...

    @property
    def export_seconds(self) -> float: ...

    @property
    def reports(self) -> Mapping[int, ServerFacts]: ...


class RunningEvaluationFacts(Protocol):
    """An evaluation as it began."""

    @property
    def due_step(self) -> int: ...

    @property
    def begun_step(self) -> int: ...

    @property
    def version(self) -> int: ...


class EvaluationCountsFacts(Protocol):
    """Sums over all samples and ranks; ``ratios`` by name, absent where nothing was counted."""

    @property
    def num_wanted(self) -> int: ...

    @property
    def num_answered(self) -> int: ...

    @property
    def ratios(self) -> Mapping[str, float]: ...


class EvaluationFacts(Protocol):
    """What every rank learns of an evaluation that has ended."""

    @property
    def run(self) -> RunningEvaluationFacts: ...

    @property
    def ended_step(self) -> int: ...

    @property
    def end(self) -> str: ...

    @property
    def counts(self) -> EvaluationCountsFacts: ...


class OriginFacts(Protocol):
    """Where a row stands; without file and line it is in no local JSONL."""

    @property
    def file(self) -> str | None: ...

    @property
    def line(self) -> int | None: ...

    @property
    def images(self) -> Sequence[str | None]: ...


class FailureFacts(Protocol):
    """One call that failed; ``num_requests`` is 0 for a probe or an ordered call."""

    @property
    def end(self) -> str: ...

    @property
    def num_requests(self) -> int: ...


class BatchFacts(Protocol):
    """What became of one batch of samples at the rollout servers."""

    @property
    def rollouts(self) -> Sequence[RolloutFacts]: ...

    @property
    def returned(self) -> Sequence[object]: ...

    @property
    def aborted(self) -> Sequence[object]: ...

    @property
    def quarantined(self) -> Sequence[object]: ...

    @property
    def failures(self) -> Sequence[FailureFacts]: ...

    @property
    def num_posts(self) -> int: ...
