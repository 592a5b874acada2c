"""Every event of a run: one tagged union, by which ranks write ``RUN_DIR/events/rankN.jsonl`` and all readers read it.

A line is one event. A kind that is none of these is another program's and is passed over; fields that are not declared
are, too. Numbers that are not finite are text. ``docs/design/formats.md`` lists what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from swift_stage2.records import EvaluationCounts, PostFailure, ServerReport
from swift_stage2.scheduling.step_plan import Channel, SkipReason
from swift_stage2.telemetry.sample_events import (
    Advantages,
    Event,
    Match,
    RecordedCompletion,
    SampleEvent,
    StreamState,
)

NsByActivity = Mapping[str, int]


class Start(Event):
    """A process begins before ``step`` with the stream's ``state``, from the checkpoint ``save_id`` if it resumes."""

    kind: Literal["start"] = "start"
    run_id: str
    step: int
    world_size: int
    total_steps: int = 0
    queue_limit: int | None = None
    version_window: int = 0
    likeness: str = "IoU"
    save_id: str | None = None
    state: StreamState | None = None
    seed: int = 0
    decoding: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    surroundings: Mapping[str, Any] = {}


class TrainedPack(BaseModel):
    model_config = ConfigDict(frozen=True)

    pack_id: str
    version: int


class Step(Event):
    """The plan of a step, why B was skipped, versions, packs, and the main thread's time since the plan before."""

    kind: Literal["step"] = "step"
    step: int
    channel: Channel
    wants_b: bool
    skip_reason: SkipReason | None
    version: int
    version_lag: int | None
    queue_depth: int
    infer_in_flight: int
    round_pending: bool
    round_in_transfer: bool = False
    plan_seconds: float
    num_tokens: int
    num_supervised_tokens: int
    packs: tuple[TrainedPack, ...]
    activity_ns: NsByActivity


class Losses(Event):
    """With ``telemetry.record``: a step is over; the loss of every micro_step as ``float.hex``."""

    kind: Literal["losses"] = "losses"
    step: int
    losses: tuple[str, ...]


class Loss(Event):
    """The loss as ms-swift logs it."""

    kind: Literal["loss"] = "loss"
    step: int
    loss: float


class CaughtUp(Event):
    """A server that came late took the last round's weights."""

    kind: Literal["catch_up"] = "catch_up"
    step: int
    round_id: str
    version: int
    seconds: float
    servers: Mapping[str, ServerReport]


class Round(Event):
    """A sync round ended: per server proof, error and seconds by phase. It is committed iff it proved a server."""

    kind: Literal["round"] = "round"
    step: int
    round_id: str
    version: int
    committed: bool
    staged: bool = False
    seconds: float
    pending_seconds: float
    canary_seconds: float
    snapshot_seconds: float
    servers: Mapping[str, ServerReport]


class Batch(Event):
    """Completions that came back, and requests that failed, since the last one."""

    kind: Literal["batch"] = "batch"
    seconds: float
    num_rollouts: int
    num_returned: int
    num_aborted: int
    num_quarantined: int
    num_posts: int
    failures: tuple[PostFailure, ...]


class Metrics(Event):
    """At logging steps and at the end: every number of this rank, and the time of both threads."""

    kind: Literal["metrics"] = "metrics"
    step: int | None
    epoch: float | None
    numbers: Mapping[str, float]
    activity_ns: NsByActivity
    wall_ns: int
    pipeline_ns: NsByActivity | None = None
    pipeline_wall_ns: int | None = None


class Evaluation(Event):
    """An evaluation ended before ``step``: how, with which counts and ratios."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    due_step: int
    begun_step: int
    version: int
    end: str
    counts: EvaluationCounts
    ratios: Mapping[str, float]


class EvaluationScores(Event):
    """On rank 0: AP and its like of an evaluation."""

    kind: Literal["evaluation_scores"] = "evaluation_scores"
    due_step: int
    begun_step: int
    version: int
    scores: Mapping[str, float]


class EvaluationPost(Event):
    """A request of an evaluation is over."""

    kind: Literal["post"] = "post"
    server: str
    version: int
    end: str
    seconds: float
    rows: tuple[int, ...]


class EvaluationFailure(Event):
    """A row that was given up in an evaluation, and why."""

    kind: Literal["evaluation_failure"] = "evaluation_failure"
    row: int
    message: str


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
    """The process ended in order and writes nothing after this; ``unused_b`` says why B was wanted and hardly ran."""

    kind: Literal["end"] = "end"
    unused_b: str = ""


class Damaged(Event):
    """Never written: the reader puts it in the place of a line that is no event."""

    kind: Literal["damaged"] = "damaged"


AnyEvent = (
    Start | Step | Losses | Loss | CaughtUp | Round | Batch | Metrics | Evaluation | EvaluationScores
    | EvaluationPost | EvaluationFailure | Warned | RecordedCompletion | Advantages | Match | Checkpoint | End | Damaged
    | SampleEvent
)  # fmt: skip
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
