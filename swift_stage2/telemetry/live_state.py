"""Gathers what the live view shows: on rank 0 from what it is told, in another process from the audits that grow.

No thread, no output. Records that are not yet whole stay for the next look.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from swift_stage2.records import EvaluationRecord, RoundOutcome, StepRecord
from swift_stage2.telemetry.audit import Record, audit_path
from swift_stage2.telemetry.metrics import MergedMetrics
from swift_stage2.telemetry.reading import AuditTail
from swift_stage2.telemetry.record_forms import LIVE_FORMS, has_form

_SMOOTHING = 0.1  # weight of the newest step in the moving average of step seconds
_NUM_WARNINGS = 3
_NUM_CHANNELS = 20
_RATE_WINDOW_S = 10.0
_OF_A_STEP = ("step", "channel", "skip_reason", "version", "version_lag", "round_pending")
_RATE_BATCHES = 8  # slow servers answer so few in the window that the rate would read 0


@dataclass(frozen=True, slots=True)
class LastRound:
    """The most recent sync round."""

    step: int
    version: int
    seconds: float
    num_proven: int
    num_servers: int


@dataclass(frozen=True, slots=True)
class LastEvaluation:
    """The most recent evaluation on the servers that has ended."""

    version: int
    end: str
    num_answered: int
    num_wanted: int
    f1: float | None
    """None where nothing was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """One moment of a run, as rank 0 knows it. None is what is not known yet."""

    step: int = 0
    """Optimizer steps begun."""
    total_steps: int = 0
    seconds_per_step: float | None = None
    epoch: float | None = None
    loss: float | None = None
    channel: str = "A"
    b_enabled: bool = True
    num_b_run: int = 0
    num_b_skipped: int = 0
    skip_reason: str | None = None
    """Why the last skipped B step was skipped."""
    version: int = 0
    version_lag: int | None = None
    queue_depths: tuple[int | None, ...] = ()
    """By rank, at the last logging step."""
    queue_limit: int | None = None
    rollouts_per_s: float | None = None
    round_pending: bool = False
    last_round: LastRound | None = None
    last_evaluation: LastEvaluation | None = None
    warnings: tuple[str, ...] = ()

    def after_step(
        self,
        *,
        step: int,
        channel: str,
        skip_reason: str | None,
        version: int,
        version_lag: int | None,
        round_pending: bool,
        seconds_per_step: float | None,
    ) -> LiveState:
        """One more step has begun."""
        return replace(
            self,
            step=step + 1,
            seconds_per_step=seconds_per_step,
            channel=str(channel),
            num_b_run=self.num_b_run + (channel == "B"),
            num_b_skipped=self.num_b_skipped + (skip_reason is not None),
            skip_reason=self.skip_reason if skip_reason is None else str(skip_reason),
            version=version,
            version_lag=self.version_lag if version_lag is None else version_lag,
            round_pending=round_pending,
        )

    def with_warning(self, message: str) -> LiveState:
        """One more warning; the newest few are kept."""
        return replace(self, warnings=(*self.warnings, message)[-_NUM_WARNINGS:])

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present pace."""
        if self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    @property
    def queue_depth_min(self) -> int | None:
        """The queue that gates every rank's next B step."""
        return min((depth for depth in self.queue_depths if depth is not None), default=None)


class _Pace:
    """A moving average of the seconds between steps."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._average: float | None = None

    def step(self, now_s: float) -> float | None:
        """Another step begins; None until there were two."""
        before, self._last_s = self._last_s, now_s
        if before is not None and now_s > before:
            seconds = now_s - before
            average = seconds if self._average is None else self._average
            self._average = average + _SMOOTHING * (seconds - average)
        return self._average

    def pause(self) -> None:
        """What passes until the next step is no step's time."""
        self._last_s = None


class LiveTracker:
    """Holds rank 0's own ``LiveState`` and the few sums behind it."""

    def __init__(
        self, total_steps: int, b_enabled: bool = True, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = LiveState(total_steps=total_steps, b_enabled=b_enabled)
        self._now_s = now_s
        self._pace = _Pace()
        self._last_merge: tuple[float, float] | None = None

    def step(self, facts: StepRecord) -> None:
        """Take in one step."""
        self.state = self.state.after_step(
            step=facts.step,
            channel=facts.plan.channel,
            skip_reason=facts.plan.skip_reason,
            version=facts.version,
            version_lag=facts.version_lag,
            round_pending=facts.round_pending,
            seconds_per_step=self._pace.step(self._now_s()),
        )

    def merge(self, merged: MergedMetrics, *, epoch: float | None) -> None:
        """Take in the numbers of all ranks."""
        now, num_rollouts = self._now_s(), merged.values["rollouts_received"]
        rate = None
        if self._last_merge is not None and now > self._last_merge[0]:
            rate = (num_rollouts - self._last_merge[1]) / (now - self._last_merge[0])
        self._last_merge = (now, num_rollouts)
        limit = merged.values.get("queue_limit")
        depths = merged.per_rank["queue_depth"]
        self.state = replace(
            self.state,
            epoch=self.state.epoch if epoch is None else epoch,
            queue_depths=tuple(None if depth is None else int(depth) for depth in depths),
            queue_limit=None if limit is None else int(limit),
            rollouts_per_s=rate,
        )

    def loss(self, loss: float) -> None:
        """Take in the loss that was logged last."""
        self.state = replace(self.state, loss=loss)

    def round(self, step: int, outcome: RoundOutcome) -> None:
        """Take in a round that has ended."""
        last = LastRound(step, outcome.version, outcome.seconds, len(outcome.proven), len(outcome.reports))
        self.state = replace(self.state, last_round=last)

    def evaluation(self, facts: EvaluationRecord) -> None:
        """Take in an evaluation that has ended."""
        counts = facts.counts
        last = LastEvaluation(
            facts.run.version, facts.end, counts.num_answered, counts.num_wanted, counts.ratios.get("f1")
        )
        self.state = replace(self.state, last_evaluation=last)

    def warning(self, message: str) -> None:
        """Take in a warning."""
        self.state = self.state.with_warning(message)


class RunProgress:
    """The present ``LiveState`` of a run. What is the same on all ranks is taken from rank 0."""

    def __init__(
        self,
        run_dir: Path,
        num_ranks: int,
        total_steps: int,
        *,
        b_enabled: bool,
        queue_limit: int | None = None,
    ) -> None:
        self._tails = [AuditTail(audit_path(run_dir, rank)) for rank in range(num_ranks)]
        self._depths: list[int | None] = [None] * num_ranks
        self._channels: deque[str] = deque(maxlen=_NUM_CHANNELS)
        self._rollouts: deque[tuple[float, int]] = deque()
        self._pace = _Pace()
        self.state = LiveState(total_steps=total_steps, b_enabled=b_enabled, queue_limit=queue_limit)

    @classmethod
    def of_run(cls, run_dir: Path) -> RunProgress | None:
        """Of a run that tells of itself in its audit; None as long as it has told nothing."""
        records = AuditTail(audit_path(run_dir, 0)).read()
        starts = [record for record in records if record["kind"] == "start" and has_form(record, LIVE_FORMS)]
        if not starts:
            return None
        start = starts[-1]
        return cls(
            run_dir,
            start["world_size"],
            start["total_steps"],
            b_enabled=start["queue_limit"] is not None,
            queue_limit=start["queue_limit"],
        )

    def refresh(self) -> LiveState:
        """Takes in what was written since the last call."""
        records = [record for tail in self._tails for record in tail.read()]
        for record in sorted(records, key=lambda record: record["time"]):
            if has_form(record, LIVE_FORMS):
                self._take(record)
            else:
                self._take_warning(
                    "the audit holds lines that are none of this release's; they are not shown"
                )
        return self.state

    def _take(self, record: Record) -> None:
        match record["kind"]:
            case "start" if record["rank"] == 0:  # an earlier process's steps are history
                self.state = replace(self.state, step=record["step"], num_b_run=0, num_b_skipped=0)
                self._pace.pause()
                self._rollouts = deque([(record["time"], 0)])
            case "step":
                self._take_step(record)
            case "batch":
                self._rollouts.append((record["time"], record["num_rollouts"]))
            case "round" if record["rank"] == 0:
                self._take_round(record)
            case "metrics" if record["rank"] == 0:
                epoch = record.get("epoch")
                self.state = replace(self.state, epoch=self.state.epoch if epoch is None else epoch)
            case "loss" if record["rank"] == 0:
                self.state = replace(self.state, loss=float(record["loss"]))
            case "warning":
                self._take_warning(str(record["message"]))

    def _take_step(self, record: Record) -> None:
        if self.state.b_enabled and record["rank"] < len(self._depths):
            self._depths[record["rank"]] = record["queue_depth"]
            self.state = replace(self.state, queue_depths=tuple(self._depths))
        if record["rank"] != 0:
            return
        told = {name: record[name] for name in _OF_A_STEP}
        self.state = self.state.after_step(**told, seconds_per_step=self._pace.step(record["time"]))
        self._channels.append(record["channel"])
        rate = self._rate(record["time"])
        self.state = replace(self.state, channel="".join(self._channels), rollouts_per_s=rate)

    def _take_round(self, record: Record) -> None:
        proven = [server["proven"] for server in record["servers"].values()]
        last = LastRound(record["step"], record["version"], record["seconds"], sum(proven), len(proven))
        self.state = replace(self.state, last_round=last)

    def _take_warning(self, message: str) -> None:
        if message not in self.state.warnings:  # every rank tells what all ranks found
            self.state = self.state.with_warning(message)

    def _rate(self, now: float) -> float | None:
        """Rollouts per second of all ranks, over some seconds or the last few batches, whichever is longer."""
        if not self.state.b_enabled or not self._rollouts:
            return None
        batches = self._rollouts
        while len(batches) > _RATE_BATCHES + 1 and batches[1][0] < now - _RATE_WINDOW_S:
            batches.popleft()
        since = batches[0][0]  # its own rollouts were made before it
        return sum(count for _, count in islice(batches, 1, None)) / (now - since) if now > since else None
