"""Turns a stream of step plans into a verdict when channel B hardly ever runs.

Counters alone do not save such a run. Over the last ``grace_steps`` steps fewer than half of the
wanted B steps ran: that is the verdict, with the cause that was met most often. Plans are the same
on every rank, so all ranks reach the verdict at the same step.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan


@dataclass(frozen=True, slots=True)
class StarvationVerdict:
    """Channel B starved over the last ``num_steps`` steps."""

    num_steps: int
    num_wanted: int
    num_run: int
    cause: SkipReason

    def __str__(self) -> str:
        return (
            f"channel B ran at {self.num_run} of {self.num_wanted} wanted steps among the last {self.num_steps}, "
            f"fewer than half; most frequent cause: {self.cause}"
        )


class StarvationWatch:
    """Remembers the last ``grace_steps`` plans.

    After a verdict it forgets them, so that a lasting starvation is told once per ``grace_steps``.
    """

    def __init__(self, grace_steps: int) -> None:
        if grace_steps < 1:
            raise ValueError(
                f"starvation.grace_steps is at least 1, got grace_steps={grace_steps}; 200 is the default"
            )
        self._grace_steps = grace_steps
        self._plans: deque[StepPlan] = deque()
        self._num_run = 0
        self._skips: Counter[SkipReason] = Counter()

    def observe(self, plan: StepPlan) -> StarvationVerdict | None:
        """Take in the plan of one step; return a verdict if B has starved since the last one."""
        self._remember(plan)
        if len(self._plans) < self._grace_steps:
            return None
        num_skipped = self._skips.total()
        if self._num_run >= num_skipped:
            return None
        cause = max(self._skips, key=lambda reason: self._skips[reason])
        verdict = StarvationVerdict(self._grace_steps, self._num_run + num_skipped, self._num_run, cause)
        self._forget()
        return verdict

    def _remember(self, plan: StepPlan) -> None:
        if len(self._plans) == self._grace_steps:
            self._count(self._plans.popleft(), -1)
        self._plans.append(plan)
        self._count(plan, +1)

    def _count(self, plan: StepPlan, sign: int) -> None:
        if plan.channel is Channel.B:
            self._num_run += sign
        elif plan.skip_reason is not None:
            self._skips[plan.skip_reason] += sign

    def _forget(self) -> None:
        self._plans.clear()
        self._skips.clear()
        self._num_run = 0
