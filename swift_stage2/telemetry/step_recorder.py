"""Turns what the learner reports, its steps and sync rounds, into counters, gauges and audit records.

Main thread only. Every step record carries the main thread's time since the one before it, so that the
records of a run add up to its wall time.
"""

from __future__ import annotations

from swift_stage2.telemetry.activity import ActivityClock
from swift_stage2.telemetry.audit import AuditLog
from swift_stage2.telemetry.counters import Counters
from swift_stage2.telemetry.facts import RoundFacts, StepFacts


class StepRecorder:
    """One rank's side of the learner's events. Without channel B, the gauges of its parts stay unset."""

    def __init__(self, counters: Counters, audit: AuditLog, clock: ActivityClock, *, b_enabled: bool) -> None:
        self._counters = counters
        self._audit = audit
        self._clock = clock
        self._b_enabled = b_enabled
        self._told_ns = clock.totals_ns()

    def resumed(self) -> None:
        """The clock now holds the time of earlier processes, which their own records have told."""
        self._told_ns = self._clock.totals_ns()

    def step(self, facts: StepFacts) -> None:
        """One step, when its plan is made."""
        self._count(facts)
        if self._b_enabled:
            self._gauge(facts)
        totals = self._clock.totals_ns()
        spent = {activity: ns - self._told_ns[activity] for activity, ns in totals.items()}
        self._told_ns = totals
        self._audit.write(
            "step",
            step=facts.step,
            channel=facts.plan.channel,
            wants_b=facts.plan.wanted_b,
            skip_reason=facts.plan.skip_reason,
            version=facts.version,
            version_lag=facts.version_lag,
            queue_depth=facts.queue_depth,
            infer_in_flight=facts.infer_in_flight,
            round_pending=facts.round_pending,
            plan_seconds=facts.plan_seconds,
            num_tokens=sum(pack.num_tokens for pack in facts.packs),
            packs=[{"pack_id": pack.pack_id, "version": pack.version} for pack in facts.packs],
            activity_ns={activity: ns for activity, ns in spent.items() if ns},
        )

    def round(self, step: int, outcome: RoundFacts, pending_seconds: float) -> None:
        """One sync round that has ended; it is committed iff a server was proven."""
        num_failed = sum(not report.proven for report in outcome.reports.values())
        committed = num_failed < len(outcome.reports)
        self._counters.add("sync_rounds_committed" if committed else "sync_rounds_failed")
        self._counters.add("sync_servers_failed", num_failed)
        self._audit.write(
            "round",
            step=step,
            round_id=outcome.round_id,
            version=outcome.version,
            committed=committed,
            seconds=outcome.seconds,
            pending_seconds=pending_seconds,
            canary_seconds=outcome.canary_seconds,
            export_seconds=outcome.export_seconds,
            servers=dict(outcome.reports),
        )

    def _count(self, facts: StepFacts) -> None:
        add, plan = self._counters.add, facts.plan
        add("steps")
        add("b_steps_wanted", int(plan.wanted_b))
        add("b_steps_run", int(plan.channel == "B"))
        if plan.skip_reason is not None:
            add(f"b_steps_skipped/{plan.skip_reason}")
        add("packs_trained", len(facts.packs))
        add("tokens_trained", sum(pack.num_tokens for pack in facts.packs))
        add("supervised_tokens_trained", sum(pack.num_supervised_tokens for pack in facts.packs))
        add("stage_seconds/plan", facts.plan_seconds)

    def _gauge(self, facts: StepFacts) -> None:
        self._counters.set("queue_depth", facts.queue_depth)
        self._counters.set("ver_current", facts.version)
        self._counters.set("sync_pending", int(facts.round_pending))
        self._counters.set("infer_inflight", facts.infer_in_flight)
        if facts.version_lag is not None:
            self._counters.raise_to("ver_lag", facts.version_lag)
