"""Turns merged numbers into TensorBoard scalars under the tags of the metrics table.

Totals are totals of the run; ratios cover the window since the last logging step and are absent when nothing
happened in it. Pure; called by the facade on every rank, so that all ranks hold the same window.
"""

from __future__ import annotations

from collections.abc import Mapping

from swift_stage2.telemetry.activity import NANOSECONDS, Activity
from swift_stage2.telemetry.facts import PlanFacts
from swift_stage2.telemetry.merging import MergedMetrics
from swift_stage2.telemetry.metrics import METRICS, PREFIX, RATIOS, SKIP_REASONS, Ratio


def scalars_of_merge(merged: MergedMetrics, window_start: Mapping[str, float]) -> dict[str, float]:
    """Every scalar of one logging step. ``window_start`` holds the counters at the one before."""
    scalars = {
        PREFIX + metric.tag: float(merged.values[metric.name])
        for metric in METRICS
        if metric.tag is not None and metric.name in merged.values and _is_used(metric.name, merged)
    }
    for ratio in RATIOS:
        value = _ratio(ratio, merged.values, window_start)
        if value is not None:
            scalars[PREFIX + ratio.tag] = value
    return scalars | _schedule(merged.values) | _activities(merged.activity_ns)


def scalars_of_plan(plan: PlanFacts) -> dict[str, float]:
    """What the plan of one step says; equal on every rank."""
    return {
        f"{PREFIX}async/policy_wants_b": float(plan.wanted_b),
        f"{PREFIX}async/step_kind_b": float(plan.channel == "B"),
        f"{PREFIX}async/b_step_skipped_due_to_queue": float(plan.skip_reason == "not_enough_packs"),
    }


def _is_used(name: str, merged: MergedMetrics) -> bool:
    """Stages that this run's pipeline does not time one by one would be lines at zero."""
    return not name.startswith("stage_seconds/") or merged.values[name] > 0


def _ratio(ratio: Ratio, values: Mapping[str, float], window_start: Mapping[str, float]) -> float | None:
    numerator, denominator = (
        sum(values[name] - window_start.get(name, 0) for name in names)
        for names in (ratio.numerator, ratio.denominator)
    )
    return numerator / denominator if denominator else None


def _schedule(values: Mapping[str, float]) -> dict[str, float]:
    if not values["steps"]:
        return {}
    return {
        f"{PREFIX}async/b_ratio_realized": values["b_steps_run"] / values["steps"],
        f"{PREFIX}async/b_debt": values["b_steps_wanted"] - values["b_steps_run"],
        f"{PREFIX}async/b_steps_skipped_total": sum(values[f"b_steps_skipped/{why}"] for why in SKIP_REASONS),
    }


def _activities(activity_ns: Mapping[Activity, int]) -> dict[str, float]:
    times = {f"{PREFIX}time/learner_{activity}": ns / NANOSECONDS for activity, ns in activity_ns.items()}
    return times | {f"{PREFIX}time/learner_wall": sum(activity_ns.values()) / NANOSECONDS}
