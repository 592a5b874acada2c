"""Gathers what a verdict is computed from: the work of each rank, the course of the run, its knobs. Pure."""

from __future__ import annotations

import statistics
from collections import Counter

from swift_stage2.report.course import Course, Knobs
from swift_stage2.report.run_data import RunData
from swift_stage2.report.steps_over_time import pipeline_seconds, syncing_seconds, trained_steps
from swift_stage2.report.verdict import RankWork
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.rank_records import RankRecords
from swift_stage2.telemetry.recorders import UnusedB
from swift_stage2.telemetry.summary import RunSummary


def works_of(run: RunData) -> list[RankWork]:
    """Every rank's work up to its last metrics record, which alone tells of the pipeline; all of it without one."""
    return [_work(records) for records in run.ranks]


def course_of(run: RunData, summary: RunSummary) -> Course:
    """What happened, as the summary counts it."""
    errors, totals = summary.server_errors, summary.totals
    return Course(
        num_steps=summary.num_steps,
        num_b_wanted=summary.num_b_wanted,
        num_b_run=summary.num_b_run,
        skips=summary.skips,
        num_stale=int(totals["packs_dropped_stale"] + totals["segments_dropped_stale"]),
        num_rounds=summary.num_rounds_committed + summary.num_rounds_failed,
        num_servers_failed=sum(errors.values()),
        main_server_error=next(iter(errors), None),
        post_steps=_post_steps(run),
        unused=UnusedB(
            num_wanted=summary.num_b_wanted,
            num_run=summary.num_b_run,
            skips=Counter(summary.skips),
            num_rounds=summary.num_rounds_committed + summary.num_rounds_failed,
            num_proven=summary.num_rounds_committed,
            errors=Counter(errors),
        ).describe(),
    )


def knobs_of(run: RunData) -> Knobs:
    """The settings; the window also from the ledger, which has always held it."""
    prefetch = ("stage2_ab", "channel_b", "prefetch")
    servers = run.setting("rollout", "servers")
    window = run.number_setting(*prefetch, "version_window")
    return Knobs(
        b_ratio=run.number_setting("stage2_ab", "schedule", "b_ratio"),
        sync_every_steps=run.number_setting(*prefetch, "sync_every_steps") or None,
        version_window=_window_of_ledger(run) if window is None else window,
        num_servers=len(servers) if isinstance(servers, list) and servers else None,
    )


def _work(records: RankRecords) -> RankWork:
    last = records.metrics[-1] if records.metrics else None
    known = records.until(last["time"]) if last else records
    numbers = last["numbers"] if last else {}
    return RankWork(
        rank=records.rank,
        steps=trained_steps(known),
        syncing_s=syncing_seconds(known),
        pipeline_s=pipeline_seconds(last) if last else None,
        packs_made=int(numbers.get("packs_made", 0)),
        packs_trained=int(numbers.get("packs_trained", 0)),
    )


def _post_steps(run: RunData) -> tuple[float, float] | None:
    """Lower and upper decile of an answered POST's seconds, in steps of the median length."""
    posts = [
        record["seconds"]
        for records in run.histories.values()
        for record in records
        if record["kind"] == Entry.FINISHED and record["end"] == "answered"
    ]
    steps = [step.seconds for step in trained_steps(run.first)] if run.first else []
    if len(posts) < 2 or not steps or not (step_s := statistics.median(steps)):
        return None
    deciles = statistics.quantiles(posts, n=10, method="inclusive")
    return deciles[0] / step_s, deciles[-1] / step_s


def _window_of_ledger(run: RunData) -> int | None:
    starts = [
        record for records in run.histories.values() for record in records if record["kind"] == Entry.START
    ]
    return starts[-1].get("version_window") if starts else None
