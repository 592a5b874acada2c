"""Gathers what the live view shows from steps, merges, rounds and warnings. Rank 0 only; no thread, no output."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swift_stage2.telemetry.facts import EvaluationFacts, RoundFacts, StepFacts
from swift_stage2.telemetry.merging import MergedMetrics

_SMOOTHING = 0.1  # weight of the newest step in the moving average of step seconds
_NUM_WARNINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRound:
    """The most recent sync round."""

    step: int
    version: int
    seconds: float
    num_proven: int
    num_servers: int


@dataclass(frozen=True, slots=True, kw_only=True)
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


class LiveTracker:
    """Holds the present ``LiveState`` and the few sums behind it."""

    def __init__(
        self, total_steps: int, b_enabled: bool = True, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = LiveState(total_steps=total_steps, b_enabled=b_enabled)
        self._now_s = now_s
        self._last_step_s: float | None = None
        self._last_merge: tuple[float, float] | None = None

    def step(self, facts: StepFacts) -> None:
        """Take in one step."""
        state, reason = self.state, facts.plan.skip_reason
        self.state = replace(
            state,
            step=facts.step + 1,
            seconds_per_step=self._pace(),
            channel=str(facts.plan.channel),
            num_b_run=state.num_b_run + (facts.plan.channel == "B"),
            num_b_skipped=state.num_b_skipped + (reason is not None),
            skip_reason=state.skip_reason if reason is None else str(reason),
            version=facts.version,
            version_lag=state.version_lag if facts.version_lag is None else facts.version_lag,
            round_pending=facts.round_pending,
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

    def round(self, step: int, outcome: RoundFacts) -> None:
        """Take in a round that has ended."""
        reports = outcome.reports.values()
        num_proven = sum(report.proven for report in reports)
        last = LastRound(
            step=step,
            version=outcome.version,
            seconds=outcome.seconds,
            num_proven=num_proven,
            num_servers=len(reports),
        )
        self.state = replace(self.state, last_round=last)

    def evaluation(self, facts: EvaluationFacts) -> None:
        """Take in an evaluation that has ended."""
        counts = facts.counts
        last = LastEvaluation(
            version=facts.run.version,
            end=facts.end,
            num_answered=counts.num_answered,
            num_wanted=counts.num_wanted,
            f1=counts.ratios.get("f1"),
        )
        self.state = replace(self.state, last_evaluation=last)

    def warning(self, message: str) -> None:
        """Keep the newest few."""
        self.state = replace(self.state, warnings=(*self.state.warnings, message)[-_NUM_WARNINGS:])

    def _pace(self) -> float | None:
        now, before = self._now_s(), self._last_step_s
        self._last_step_s = now
        if before is None:
            return self.state.seconds_per_step
        average = self.state.seconds_per_step
        return now - before if average is None else average + _SMOOTHING * (now - before - average)
