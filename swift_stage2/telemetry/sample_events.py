"""Events of samples: what becomes of each, from its draw to its end. A sample is epoch, position, row, attempt.

``events`` puts them into one union with those of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from time import time as unix_time
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from swift_stage2.columns import given_by
from swift_stage2.records import MatchQuality, Pack, Rollout, SampleKey, VersionSpan

Key = tuple[int, int, int, int]
"""Epoch, position in the rank's shard, row of the data set, attempt."""
Keys = tuple[Key, ...]
Place = tuple[int, int]
"""Epoch and position: what names a sample of a rank's stream for good."""
Spans = tuple[tuple[int, int, int], ...]
"""Version, first token, token behind the last."""


class ReturnReason(StrEnum):
    """Why a drawn sample came back untrained, to be drawn again."""

    STALE = "stale"
    """Its rollout fell out of the version window."""
    OVERFLOW = "overflow"
    """Its pack was the oldest of a queue over its limit."""
    TIMED_OUT = "timed_out"
    """It was asked alone and did not answer in time."""
    ABORTED = "aborted"
    """Its server ended it early for a pending round."""
    FAILED = "failed"
    """No server answered it: none was proven, the one asked was lost or refused, or the batch's time was over. Or no
    round proved the weights that answered."""
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


def keys_of(samples: Iterable[SampleKey]) -> Keys:
    return tuple((each.epoch, each.position, each.index, each.attempt) for each in samples)


def spans_of(spans: Sequence[VersionSpan]) -> Spans:
    return tuple((span.version, span.start, span.end) for span in spans)


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    kind: str
    time: float = Field(default_factory=unix_time)


class StreamState(BaseModel):
    """The stream's cursor and the samples in hand."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    position: int
    num_rows: int
    world_size: int
    outstanding: Keys
    num_generations: int = 1
    seed: int = 0
    stream: str = ""


class Drawn(Event):
    """Samples are about to be asked for a rollout each."""

    kind: Literal["drawn"] = "drawn"
    samples: Keys


class Sent(Event):
    """A POST left, which asks a server proven with ``version`` for one rollout each."""

    kind: Literal["sent"] = "sent"
    samples: Keys
    server: str
    seed: int
    version: int


class Finished(Event):
    """It ended: ``end`` is "answered" or says why not."""

    kind: Literal["finished"] = "finished"
    samples: Keys
    server: str
    end: str
    seconds: float


class Cut(Event):
    """Its answer had been aborted and is going to be resumed: ``spans`` are those of all ``num_tokens`` so far."""

    kind: Literal["cut"] = "cut"
    samples: Keys
    num_tokens: int
    spans: Spans

    @classmethod
    def of(cls, rollout: Rollout) -> Cut:
        num_tokens = len(rollout.token_ids)
        return cls(
            samples=keys_of([rollout.sample.key]), num_tokens=num_tokens, spans=spans_of(rollout.spans)
        )


class RecordedCompletion(Event):
    """With ``telemetry.record``: a server's answer, told before it becomes a segment; what came beside its tokens."""

    kind: Literal["completion"] = "completion"
    sample: Key
    text: str
    token_ids: tuple[int, ...]
    truncated: bool
    spans: Spans
    columns: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, rollout: Rollout) -> RecordedCompletion:
        return cls(
            sample=keys_of([rollout.sample.key])[0],
            text=rollout.text,
            token_ids=rollout.token_ids,
            truncated=rollout.truncated,
            spans=spans_of(rollout.spans),
            columns=given_by(rollout),
        )


class Advantages(Event):
    """With ``telemetry.record``: those of compared completions, told before they become segments."""

    kind: Literal["advantages"] = "advantages"
    samples: Keys
    advantages: tuple[tuple[float, ...], ...]


class Labelled(BaseModel):
    model_config = ConfigDict(frozen=True)

    label: str
    box: tuple[float, ...]
    """x1, y1, x2, y2, or x, y of a point, in the match's space."""


class Match(Event):
    """The whole match of a rollout of one of the rows that ``telemetry.gallery_rows`` keeps, or of an evaluation."""

    kind: Literal["match"] = "match"
    purpose: Literal["training", "evaluation"]
    sample: Key
    version: int
    images: tuple[str | None, ...]
    space: tuple[int, int]
    """Width and height that boxes, or points, are measured in."""
    truth: tuple[Labelled, ...]
    predicted: tuple[Labelled, ...]
    pairs: tuple[tuple[int, int, float], ...]
    """Prediction, truth, IoU or closeness of points."""
    rollout: str
    target: str
    truncated: bool
    dropped: Mapping[str, int]
    reward: Mapping[str, float]


class Matched(Event):
    """A rollout was parsed, matched and corrected; ``version`` is that of the oldest of its ``spans``."""

    kind: Literal["matched"] = "matched"
    samples: Keys
    version: int
    spans: Spans
    num_rollout_tokens: int
    quality: MatchQuality

    @classmethod
    def of(cls, rollout: Rollout, quality: MatchQuality) -> Matched:
        return cls(
            samples=keys_of([rollout.sample.key]),
            version=rollout.version,
            spans=spans_of(rollout.spans),
            num_rollout_tokens=len(rollout.token_ids),
            quality=quality,
        )


class Packed(Event):
    """Segments became a pack; told before the pack can be trained or dropped."""

    kind: Literal["packed"] = "packed"
    samples: Keys
    pack_id: str
    version: int
    num_tokens: int
    capacity_tokens: int

    @classmethod
    def of(cls, pack: Pack) -> Packed:
        return cls(
            samples=keys_of(pack.keys),
            pack_id=pack.pack_id,
            version=pack.version,
            num_tokens=pack.num_tokens,
            capacity_tokens=pack.capacity_tokens,
        )


class Returned(Event):
    """They are drawn again before any new one; ``samples`` have the attempt that they are drawn with."""

    kind: Literal["returned"] = "returned"
    samples: Keys
    reason: ReturnReason


class Trained(Event):
    """``step`` takes them; it is void if the process does not survive that step and the run is resumed."""

    kind: Literal["trained"] = "trained"
    samples: Keys
    pack_id: str
    step: int
    version: int


class Quarantined(Event):
    """A sample was given up: why, with file, line and images of its row."""

    kind: Literal["quarantined"] = "quarantined"
    samples: Keys
    reason: str
    message: str
    file: str | None = None
    line: int | None = None
    images: tuple[str | None, ...] = ()


class Unused(Event):
    """Nothing is trained of their rollouts, though nothing is wrong with them."""

    kind: Literal["unused"] = "unused"
    samples: Keys
    reason: UnusedReason


SampleEvent = Drawn | Sent | Finished | Cut | Matched | Packed | Returned | Trained | Quarantined | Unused
