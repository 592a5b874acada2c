"""Every event of a run: one tagged union, by which ranks write ``RUN_DIR/events/rankN.jsonl`` and all readers read it.

A line is one event. A kind that is none of these is another program's and is passed over; fields that are not declared
are, too. Numbers that are not finite are text. ``docs/design/formats.md`` lists what stands here. A sample is epoch,
position, row, attempt; its events tell what becomes of it, from its draw to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time as unix_time
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from swift_stage2.records import (
    EvaluationCounts,
    MatchQuality,
    Pack,
    PostFailure,
    ReturnReason,
    ServerReport,
    UnusedReason,
)
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan

Key = tuple[int, int, int, int]
"""Epoch, position in the rank's shard, row of the data set, attempt."""
Keys = tuple[Key, ...]
Place = tuple[int, int]
"""Epoch and position: what names a sample of a rank's stream for good."""
Spans = tuple[tuple[int, int, int], ...]
"""Version, first token, token behind the last."""


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    kind: str
    time: float = Field(default_factory=unix_time)

    @classmethod
    def of(cls, record: object, **facts: Any) -> Self:
        """With the fields that ``record`` has by the same names, and ``facts`` for the others."""
        return cls(
            **{name: getattr(record, name) for name in cls.model_fields if hasattr(record, name)} | facts
        )


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


NsByActivity = Mapping[str, int]


class Start(Event):
    """A process begins before ``step`` with the stream's ``state``, from the checkpoint ``save_id`` if it resumes."""

    kind: Literal["start"] = "start"
    run_id: str
    step: int
    world_size: int
    queue_limit: int | None = None
    version_window: int = 0
    similarity: str = "IoU"
    save_id: str | None = None
    state: StreamState | None = None
    config: Mapping[str, Any] = {}
    surroundings: Mapping[str, Any] = {}


class Step(Event):
    """The plan of a step, why B was skipped, packs and their versions, the main thread's time since the plan before."""

    kind: Literal["step"] = "step"
    step: int
    channel: Channel
    wants_b: bool
    skip_reason: SkipReason | None
    version: int
    version_lag: int | None
    queue_depth: int
    infer_in_flight: int
    version_pending: bool
    version_in_transfer: bool = False
    plan_seconds: float
    num_supervised_tokens: int
    packs: Mapping[str, int]
    activity_ns: NsByActivity

    @classmethod
    def planned(cls, step: int, plan: StepPlan, packs: Sequence[Pack], version: int, **facts: Any) -> Step:
        """Without the main thread's time; ``facts`` are the other fields."""
        return cls(
            step=step,
            channel=plan.channel,
            wants_b=plan.wanted_b,
            skip_reason=plan.skip_reason,
            version=version,
            version_lag=max((version - pack.version for pack in packs), default=None),
            num_supervised_tokens=sum(pack.num_supervised_tokens for pack in packs),
            packs={pack.pack_id: pack.version for pack in packs},
            activity_ns={},
            **facts,
        )


class Losses(Event):
    """With ``telemetry.record``: a step is over; the loss of every micro_step as ``float.hex``."""

    kind: Literal["losses"] = "losses"
    step: int
    losses: tuple[str, ...]


class Round(Event):
    """A version's pushes ended: per server proof, error and seconds by phase. It is committed iff a server proved it.

    ``catch_up`` in place of ``round``: servers that came late took a version that others had been brought before.
    """

    kind: Literal["round", "catch_up"] = "round"
    step: int
    version: int
    committed: bool
    staged: bool = False
    seconds: float
    pending_seconds: float
    canary_seconds: float
    snapshot_seconds: float
    servers: Mapping[str, ServerReport]


class FailedPosts(Event):
    """Requests that brought no rollout: how each ended, and why."""

    kind: Literal["failures"] = "failures"
    failures: tuple[PostFailure, ...]


class Metrics(Event):
    """At logging steps and at the end: every number of this rank, and the time of both threads."""

    kind: Literal["metrics"] = "metrics"
    step: int | None
    numbers: Mapping[str, float]
    activity_ns: NsByActivity
    pipeline_ns: NsByActivity | None = None


class Evaluation(Event):
    """An evaluation ended before ``step``: how, with which counts and ratios."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    due_step: int
    begun_step: int
    version: int
    end: EvaluationEnd
    counts: EvaluationCounts
    ratios: Mapping[str, float]


class Warned(Event):
    """A warning as the user saw it."""

    kind: Literal["warning"] = "warning"
    message: str


class Checkpoint(Event):
    """``state`` is the stream's, as the checkpoint ``save_id`` before ``step`` holds it; null without channel B."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    save_id: str
    state: StreamState | None = None


class End(Event):
    """The process ended in order and writes nothing after this."""

    kind: Literal["end"] = "end"


class Damaged(Event):
    """Never written: the reader puts it in the place of a line that is no event."""

    kind: Literal["damaged"] = "damaged"


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


class RecordedCompletion(Event):
    """With ``telemetry.record``: a server's answer, told before it becomes a segment; what came beside its tokens."""

    kind: Literal["completion"] = "completion"
    sample: Key
    text: str
    token_ids: tuple[int, ...]
    truncated: bool
    spans: Spans
    columns: Mapping[str, tuple[float, ...]]
    turns: tuple[tuple[int, int], ...] = ()


class Advantages(Event):
    """With ``telemetry.record``: those of compared completions, told before they become segments."""

    kind: Literal["advantages"] = "advantages"
    samples: Keys
    advantages: tuple[tuple[float, ...], ...]


class Match(Event):
    """The whole match of a rollout of one of the rows that ``telemetry.gallery_rows`` keeps."""

    kind: Literal["match"] = "match"
    sample: Key
    version: int
    images: tuple[str | None, ...]
    space: tuple[int, int]
    """Width and height that boxes, or points, are measured in."""
    truth: tuple[tuple[str, tuple[float, ...]], ...]
    """Label, and x1, y1, x2, y2 of a box or x, y of a point."""
    predicted: tuple[tuple[str, tuple[float, ...]], ...]
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


class Packed(Event):
    """Segments became a pack; told before the pack can be trained or dropped."""

    kind: Literal["packed"] = "packed"
    samples: Keys
    pack_id: str
    version: int
    num_tokens: int
    capacity_tokens: int


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


SampleEvent = Drawn | Sent | Finished | Matched | Packed | Returned | Trained | Quarantined | Unused
AnyEvent = (
    Start | Step | Losses | Round | FailedPosts | Metrics | Evaluation
    | Warned | RecordedCompletion | Advantages | Match | Checkpoint | End | Damaged | SampleEvent
)  # fmt: skip
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
