"""Every record that travels between parts, in flow order: from a sample to its pack, then rounds and counts.

All records are frozen; whoever takes one makes the next and never edits what it was given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import reduce
from typing import Any, NamedTuple

from swift_stage2.whole_file import find_image

Box = tuple[float, float, float, float]
Coordinates = tuple[int, ...]  # a box x1, y1, x2, y2 or a point x, y, in the template's coordinate space


class SampleKey(NamedTuple):
    """A sample's place in one rank's stream; a list of four in every file of a run.

    ``attempt`` counts rollouts asked for, from 0.
    """

    epoch: int
    position: int  # within this rank's shard of the epoch
    index: int  # type: ignore[assignment]  # row in the data set; hides the method of tuples
    attempt: int = 0


def image_paths(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Absolute paths of a row's images; None for one that has no file of its own."""
    images = row.get("images") or ()
    images = images if isinstance(images, list | tuple) else [images]
    paths = [image.get("path") if isinstance(image, Mapping) else image for image in images]
    return tuple(os.path.abspath(find_image(path)) if isinstance(path, str) else None for path in paths)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of the data set: the prompt, its images, and what its answer should say."""

    key: SampleKey
    row: Mapping[str, Any]  # as the data set gives it; never changed
    truth: Any = None  # as the task read it


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Where a row stands. ``file`` and ``line`` are None of a row that is in no local JSONL."""

    file: str | None
    line: int | None
    images: tuple[str | None, ...]

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file is not None else "a row of no local JSONL"
        named = [image for image in self.images if image is not None]
        return f"{place}, image {', '.join(named)}" if named else place


class QuarantineReason(StrEnum):
    SAMPLE = "bad_sample"
    PROMPT = "prompt_mismatch"
    ROLLOUT = "poisonous_request"
    TOO_SLOW = "too_slow"


class ReturnReason(StrEnum):
    """Why a drawn sample came back untrained, to be drawn again."""

    STALE = "stale"
    """Its rollout fell out of the version window."""
    OVERFLOW = "overflow"
    """Its pack was the oldest of a queue over its limit."""
    TIMED_OUT = "timed_out"
    """It was asked alone and did not answer in time."""
    FAILED = "failed"
    """No server answered it: none was proven, the one asked was lost or refused, or the batch's time was over. Or no
    round proved the weights that answered, or the process that held its encoding was lost."""
    STOPPED = "stopped"
    """The run ended while it was asked."""

    @property
    def counts_attempt(self) -> bool:
        """True if this return counts as an attempt. A server's fault does not."""
        return self in (ReturnReason.STALE, ReturnReason.OVERFLOW, ReturnReason.TIMED_OUT)


class UnusedReason(StrEnum):
    """Why nothing is trained of a rollout that was compared with others, though nothing is wrong with it."""

    NO_VARIANCE = "no_variance"
    """All rewards of its group are equal."""
    TOO_SMALL = "too_small"
    """Fewer than ``min_group`` of its group were left."""
    DROPPED = "dropped"
    """Its segment was dropped, and too few others of its group to compare it with another rollout."""


class VersionSpan(NamedTuple):
    """Token positions ``start <= i < end`` of a rollout that were sampled under ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """The model's answer to one sample, and the weights that gave it."""

    sample: Sample
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    truncated: bool  # the server stopped it at max_new_tokens
    seed: int  # of the POST that asked, also one that a merger shared among callers
    server: str
    spans: tuple[VersionSpan, ...]
    log_probs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None  # of its tokens; of its corrected answer, if that is trained
    seconds: float = 0.0
    turns: tuple[tuple[int, int], ...] = ()
    """Runs of tokens ``start <= i < end`` that the model sampled, between which an environment spoke; none: all of
    them. ``text`` is the last one's."""
    earlier_texts: tuple[str, ...] = ()
    """Of the turns before the last, in order; a task finds them."""

    @property
    def last_turn(self) -> int:
        """The place of its first token."""
        return self.turns[-1][0] if self.turns else 0

    @property
    def version(self) -> int:
        """The oldest version that any of its tokens was sampled under."""
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        """The newest version that any of its tokens was sampled under."""
        return max(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class PostFailure:
    """One POST that brought no rollout."""

    server: str
    end: str  # how, a ``PostEnd``
    num_requests: int  # 0 for a probe or an ordered call
    reason: str


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The ends of samples that were asked together; they keep the order in which they were given."""

    rollouts: tuple[Rollout, ...] = ()
    returned: tuple[Sample, ...] = ()  # to be asked again later, their attempts not counted up
    timed_out: tuple[Sample, ...] = ()
    """Those of ``returned`` that were asked alone and did not answer in time: perhaps too slow for ever."""
    quarantined: tuple[tuple[Sample, str], ...] = ()  # poisonous requests, each with its reason
    failures: tuple[PostFailure, ...] = ()
    num_posts: int = 0
    seconds: float = 0.0  # at their place, waits for tickets included
    settings: object = None  # as they were given to ``RolloutClient.submit``

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All of them: each has one end."""
        answered = (rollout.sample for rollout in self.rollouts)
        return (*answered, *self.returned, *(sample for sample, _ in self.quarantined))


class ObjectDropReason(StrEnum):
    """Why the parser drops an object, in the order in which the reasons are tried."""

    NOT_AN_OBJECT = "not_an_object"
    UNEXPECTED_KEY = "unexpected_key"
    MISSING_BOX = "missing_box"
    WRONG_ARITY = "wrong_arity"
    INVALID_BOX = "invalid_box"
    MISSING_LABEL = "missing_label"
    OUTSIDE_LIST = "outside_list"


@dataclass(frozen=True, slots=True)
class MatchQuality:
    """Counts of one rollout against its ground truth, for the ``match/`` and ``parse/`` metrics, and its reward."""

    num_predictions: int
    num_ground_truth: int
    num_pairs: int
    sum_iou: float
    num_gated: int
    num_truncated: int  # 0 or 1
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_unclosed: int = 0  # 0 or 1: the answer's list never began, or never ended; then nothing in it counts
    num_duplicates: int = 0  # predictions without a partner, near a truth that has one
    num_beside: int = 0  # 0 or 1: thoughts, or text that is none of the list, stood beside it
    reward: Mapping[str, float] = field(default_factory=dict)  # the task's terms and their ``total``


def match_ratios(
    *, num_predictions: int, num_ground_truth: int, num_pairs: int, sum_iou: float
) -> dict[str, float]:
    """Precision, recall, F1 and mean IoU of rollouts whose counts were added up; absent where nothing was counted."""
    quotients = {
        "precision": (num_pairs, num_predictions),
        "recall": (num_pairs, num_ground_truth),
        "f1": (2 * num_pairs, num_predictions + num_ground_truth),
        "mean_iou": (sum_iou, num_pairs),
    }
    return {name: part / whole for name, (part, whole) in quotients.items() if whole}


@dataclass(frozen=True, slots=True)
class ObjectMatch:
    """The objects that a rollout found and those that there were, in the template's coordinate space."""

    predicted: tuple[tuple[str, Coordinates], ...]
    truth: tuple[tuple[str, Coordinates], ...]
    pairs: tuple[tuple[int, int, float], ...]  # prediction, truth, IoU or closeness
    places: tuple[tuple[tuple[int, int], ...], ...] = field(default=(), compare=False)
    """Of each prediction in the rollout, as ``PredictedObject`` has them; none of tasks that do not tell."""


@dataclass(frozen=True, slots=True)
class Target:
    """The corrected answer to one rollout, tokenised once as a whole."""

    text: str
    token_ids: tuple[int, ...]
    weights: tuple[float, ...]  # one per token, for ``loss_scale``
    quality: MatchQuality
    match: ObjectMatch | None = None  # None of a task without boxes or points
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The task's own: an amount, and out of how much. An evaluation divides the sums of both."""
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of ``columns.py``
    alternatives: tuple[tuple[int, int], ...] = ()  # (place, token) that is as right there; ascending
    duplicates: tuple[tuple[int, int], ...] = ()  # (place, token) that would repeat an object; ascending


@dataclass(frozen=True, slots=True)
class Segment:
    """One encoded sample, ready to be packed: what the template's collator takes of each of its sequences."""

    key: SampleKey
    version: int
    encodings: tuple[Mapping[str, Any], ...]
    num_tokens: int
    num_supervised_tokens: int
    quality: MatchQuality
    num_left_out: int = 0  # sequences that did not fit into a pack beside the first


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
    versions: tuple[int, ...] = ()  # of the segments, one per key


@dataclass(frozen=True, slots=True)
class ServerReport:
    """How one server's push ended.

    ``seconds`` by phase: begin, pack (checksums), connect, push, turn (until other servers had installed), acknowledge,
    prove.
    """

    proven: bool
    error: str | None
    proof: str  # "checksums+canary", "checksums" or "canary"
    num_bytes: int
    seconds: dict[str, float]
    transport: str = ""
    """The weights' way: "shared_memory", "tcp" ("tcp (REASON)" if nothing was mapped), "disk", "gloo" or "nccl"."""

    @classmethod
    def failed(cls, error: str) -> ServerReport:
        """Of a push that nobody can ask any more."""
        return cls(proven=False, error=error, proof="", num_bytes=0, seconds={})


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """All pushes of one version that ended together, as every rank learns of them."""

    version: int
    reports: dict[int, ServerReport] = field(default_factory=dict)
    staged: bool = False  # servers answered with their old weights until they installed these
    is_catch_up: bool = False  # the version was brought to others before
    seconds: float = 0.0  # from its beginning until the last push had ended
    canary_seconds: float = 0.0
    snapshot_seconds: float = 0.0  # of the main thread: gathering, merging, copying; once for all servers

    @property
    def proven(self) -> tuple[int, ...]:
        return tuple(server for server, report in self.reports.items() if report.proven)

    @property
    def failed(self) -> tuple[int, ...]:
        return tuple(server for server, report in self.reports.items() if not report.proven)


@dataclass(frozen=True, slots=True)
class EvaluationCounts:
    """The samples by how they ended, and the matches of those that were answered, added up."""

    num_wanted: int = 0
    num_answered: int = 0
    num_failed: int = 0  # given up: unreadable, poisonous, or without an answer after ``MAX_ASKS`` requests
    num_truncated: int = 0
    num_predictions: int = 0
    num_ground_truth: int = 0
    num_pairs: int = 0
    sum_iou: float = 0.0
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The task's own, as ``Target.metrics``; the same names on all ranks."""

    @property
    def is_whole(self) -> bool:
        """Whether every sample was answered or given up."""
        return self.num_answered + self.num_failed == self.num_wanted

    def with_answer(self, target: Target) -> EvaluationCounts:
        quality = target.quality
        return replace(
            self,
            num_answered=self.num_answered + 1,
            **{name: getattr(self, name) + getattr(quality, name) for name in _OF_QUALITY},
            metrics={name: _added(both, target.metrics.get(name)) for name, both in self.metrics.items()},
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_ranks(cls, texts: Sequence[str]) -> EvaluationCounts:
        """The sum of what ``to_json`` gave on every rank."""
        parts = [cls(**json.loads(text)) for text in texts]
        names = (each.name for each in fields(cls) if each.name != "metrics")
        sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
        own = {
            name: reduce(_added, (part.metrics[name] for part in parts), (0.0, 0.0))
            for name in parts[0].metrics
        }
        return cls(**sums, metrics=own)

    @property
    def ratios(self) -> dict[str, float]:
        """``match/``'s ratios and the truncated share, by name; absent where nothing was counted."""
        found = match_ratios(
            num_predictions=self.num_predictions,
            num_ground_truth=self.num_ground_truth,
            num_pairs=self.num_pairs,
            sum_iou=self.sum_iou,
        )
        shares = {"truncated_ratio": (self.num_truncated, self.num_answered), **self.metrics}
        return found | {name: part / whole for name, (part, whole) in shares.items() if whole}


_OF_QUALITY = ("num_truncated", "num_predictions", "num_ground_truth", "num_pairs", "sum_iou")


def _added(sums: tuple[float, float], more: tuple[float, float] | None) -> tuple[float, float]:
    return sums if more is None else (sums[0] + more[0], sums[1] + more[1])
