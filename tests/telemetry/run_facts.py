"""Steps, rounds, packs and segments as the learner and the pipeline report them: the real records, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from swift_stage2.records import (
    MatchQuality,
    Pack,
    Rollout,
    RoundOutcome,
    Sample,
    SampleKey,
    Segment,
    ServerReport,
    Target,
    VersionSpan,
)
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.event_log import EventTail, event_path
from swift_stage2.telemetry.events import Event, Step
from swift_stage2.telemetry.facade import Telemetry

EventT = TypeVar("EventT", bound=Event)

PLAN_A = StepPlan(Channel.A)
PLAN_B = StepPlan(Channel.B)


def skipped(reason: SkipReason = SkipReason.NOT_ENOUGH_PACKS) -> StepPlan:
    return StepPlan(Channel.A, reason)


def quality(pairs: int = 3, predictions: int = 4, truths: int = 6, **changes: object) -> MatchQuality:
    fields = {
        "num_predictions": predictions,
        "num_ground_truth": truths,
        "num_pairs": pairs,
        "sum_iou": 0.75 * pairs,
        "num_gated": 2,
        "num_truncated": 0,
    }
    return MatchQuality(**{**fields, **changes})  # type: ignore[arg-type]


def match(telemetry: Telemetry, counts: MatchQuality | None = None, seconds: float = 0.0) -> None:
    """The pipeline's reports of one rollout that becomes a segment."""
    key, ids, of_rollout = SampleKey(0, 0, 7), (1, 2, 3, 4), counts or quality()
    rollout = Rollout(Sample(key, {}), "a b c d", ids, (5,), False, 5, "http://s", (VersionSpan(1, 0, 4),))
    telemetry.pipeline.matched(rollout, Target("a b c d", ids, (1.0,) * 4, of_rollout), None)
    telemetry.pipeline.segment(Segment(key, 1, (), 10, 6, of_rollout), seconds)


def pack(name: str = "p", version: int = 1, num_tokens: int = 30, num_segments: int = 2) -> Pack:
    keys = tuple(SampleKey(0, position, position) for position in range(num_segments))
    return Pack(name, version, {}, keys, num_tokens, num_tokens // 2, 40)


def step(
    number: int,
    plan: StepPlan = PLAN_A,
    *,
    version: int = 1,
    packs: tuple[Pack, ...] = (),
    queue_depth: int = 0,
    in_flight: int = 0,
) -> Step:
    return Step.planned(
        number,
        plan,
        packs,
        version,
        queue_depth=queue_depth,
        infer_in_flight=in_flight,
        version_pending=False,
        plan_seconds=0.001,
    )


def round_outcome(version: int, *proven: bool, seconds: float = 1.0) -> RoundOutcome:
    reports = {
        index: ServerReport(
            ok, None if ok else "refused", "checksums", 100, {"push": 0.5 + index, "prove": 0.25}
        )
        for index, ok in enumerate(proven)
    }
    return RoundOutcome(version, reports, seconds=seconds, canary_seconds=0.125)


def started(run_dir: Path, rank: int = 0, world_size: int = 1, **options: Any) -> Telemetry:
    """A rank that has told its start."""
    telemetry = Telemetry(run_dir, rank, world_size, **({"tensorboard": False, "queue_limit": 8} | options))
    telemetry.record_start(run_id="r", step=0)
    return telemetry


def told(run_dir: Path, kind: type[EventT], rank: int = 0) -> list[EventT]:
    """A rank's events of one kind so far."""
    events = EventTail(event_path(run_dir, rank)).read()
    return [event for event in events if isinstance(event, kind)]
