"""Watches over channel B: it starves, or too many of its rollouts are cut off.

Counters alone do not save a run in which B hardly ever runs. Plans are the same on every rank, so all ranks reach a
starvation's verdict at the same step; a pause is the rank's own and travels in the step's vector.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan

FEWEST_MISSED = 4
"""Wanted B steps in a row that did not run, from which on that is told: as many as a sound grace holds at least."""


@dataclass(frozen=True, slots=True)
class Starvation:
    cause: str
    """A sentence without a full stop."""
    is_past_grace: bool
    """Whether it has lasted for the whole grace; else it is a first word."""


class StarvationWatch:
    """Gives a verdict when fewer than half of the B steps wanted in the last ``grace_steps`` steps ran.

    After it the plans are forgotten, so that a lasting starvation is told once per ``grace_steps``. Long before it, the
    fourth wanted step in a row that did not run gives a first word, once until B runs again.
    """

    def __init__(self, grace_steps: int) -> None:
        self._grace_steps = grace_steps
        self._plans: deque[StepPlan] = deque()
        self._num_run = 0
        self._skips: Counter[SkipReason] = Counter()
        self._has_run = False
        self._missed: list[SkipReason] = []  # since B ran last

    @property
    def lost(self) -> str:
        """Why the run trains without channel B for good, as it seems: a sentence without a full stop, else empty.

        No proven server was left at the last wanted step, and none of the last four wanted ran, or none at all.
        """
        is_long = len(self._missed) >= FEWEST_MISSED or not self._has_run
        is_lost = bool(self._missed) and is_long and self._missed[-1] is SkipReason.SERVERS_SUSPECT
        return self._silence() if is_lost else ""

    def observe(self, plan: StepPlan) -> Starvation | None:
        """Take in the plan of one step; return what is to be told of B since the last time."""
        if plan.channel is Channel.B:
            self._has_run = True
            self._missed.clear()
        elif plan.skip_reason is not None:
            self._missed.append(plan.skip_reason)
        if (verdict := self._judge(plan)) is not None:
            return Starvation(verdict, is_past_grace=True)
        if plan.skip_reason is not None and len(self._missed) == FEWEST_MISSED:
            return Starvation(self._silence(), is_past_grace=False)
        return None

    def _silence(self) -> str:
        ((cause, _),) = Counter(self._missed).most_common(1)
        num_missed = len(self._missed)
        return f"channel B ran at none of the last {num_missed} steps that wanted it; most frequent cause: {cause}"

    def _judge(self, plan: StepPlan) -> str | None:
        self._plans.append(plan)
        self._count(plan, +1)
        if len(self._plans) > self._grace_steps:
            self._count(self._plans.popleft(), -1)
        num_run, num_skipped = self._num_run, self._skips.total()
        if len(self._plans) < self._grace_steps or num_run >= num_skipped:
            return None
        ((cause, _),) = self._skips.most_common(1)
        self._plans.clear()
        self._skips.clear()
        self._num_run = 0
        return (
            f"channel B ran at {num_run} of {num_run + num_skipped} wanted steps among the last {self._grace_steps}, "
            f"fewer than half; most frequent cause: {cause}"
        )

    def _count(self, plan: StepPlan, sign: int) -> None:
        if plan.channel is Channel.B:
            self._num_run += sign
        elif plan.skip_reason is not None:
            self._skips[plan.skip_reason] += sign


WINDOW_ROLLOUTS = 256
MIN_ROLLOUTS = 16  # a share over fewer rollouts says too little to stop a channel
LIFT_FACTOR = 0.8


class TruncationGuard:
    """Pauses channel B above the limit on the share of truncated rollouts, and lifts that below 0.8 times the limit.

    Training on cut-off answers makes a model worse. One writer, the rank's pipeline; any thread may read ``paused``.
    """

    def __init__(self, max_truncated_ratio: float) -> None:
        self._limit = max_truncated_ratio
        self._recent: deque[bool] = deque(maxlen=WINDOW_ROLLOUTS)
        self.paused = False
        """Whether channel B must pause."""

    @property
    def truncated_ratio(self) -> float:
        """The share of truncated rollouts among the last 256; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def observe(self, truncated: bool) -> None:
        """Take in one rollout; ``paused`` follows."""
        self._recent.append(bool(truncated))
        ratio = self.truncated_ratio
        if self.paused:
            # A limit of 0 has nothing below it: there a clean window lifts the pause.
            self.paused = ratio >= LIFT_FACTOR * self._limit if self._limit > 0 else ratio > 0
        elif len(self._recent) >= MIN_ROLLOUTS:
            self.paused = ratio > self._limit
