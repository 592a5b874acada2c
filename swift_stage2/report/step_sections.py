"""What was wanted and what ran, the queue and the age of its packs, and what was dropped. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from swift_stage2.report.content import (
    Chart,
    Limit,
    Mark,
    Part,
    Section,
    Sentence,
    Tone,
    filled,
    number,
    pairs,
    series_of,
    share,
)
from swift_stage2.report.course import Knobs
from swift_stage2.report.run_data import RunData
from swift_stage2.report.steps_over_time import sampled, thinned
from swift_stage2.telemetry.rank_records import RankRecords
from swift_stage2.telemetry.summary import RunSummary


def steps_section(run: RunData, summary: RunSummary) -> Section:
    """What was wanted and what ran."""
    rows = {
        "optimizer steps": number(summary.num_steps),
        "B wanted": number(summary.num_b_wanted),
        "B run": f"{summary.num_b_run}{share(summary.num_b_run, summary.num_b_wanted)}",
        "B skipped": number(sum(summary.skips.values())),
    }
    rows |= {f"B skipped: {reason}": number(count) for reason, count in summary.skips.items()}
    differing = summary.num_disagreements
    parts: list[Part | None] = [
        pairs("Steps", rows),
        Sentence(f"{differing} steps have plans that differ between ranks: a fault.", Tone.BAD)
        if differing
        else None,
        *_gaps(run, summary),
        _wanted_and_run(run.first) if run.first and summary.num_b_wanted else None,
    ]
    return Section("steps", "What was wanted and what ran", filled(parts))


def _gaps(run: RunData, summary: RunSummary) -> Iterator[Sentence]:
    """What is missing in the audit that all of the page but the account of samples is made from."""
    if not any(records.starts or records.steps for records in run.ranks):
        yield Sentence(
            "There is no audit (audit/rank*.jsonl), so nothing of steps, times and rounds can be told.",
            Tone.WARN,
        )
    if summary.missing_ranks:
        missing = ", ".join(map(str, summary.missing_ranks))
        yield Sentence(f"The audit of rank {missing} is missing; it counts nowhere on this page.", Tone.WARN)
    if lost := summary.num_records_lost:
        yield Sentence(f"{lost} records of the audit were lost (full disk or damaged file).", Tone.WARN)


def queue_section(run: RunData, knobs: Knobs, summary: RunSummary) -> Section:
    """Ready packs and the age of what was trained."""
    numbers = sorted({number for records in run.ranks for number in records.steps})
    every = [[r.steps[number] for r in run.ranks if number in r.steps] for number in numbers]
    depths = [(s[0]["step"], min(step["queue_depth"] or 0 for step in s)) for s in every]
    lags = [
        (s[0]["step"], max(step["version_lag"] or 0 for step in s)) for s in every if s[0]["channel"] == "B"
    ]
    limit = next((r.metrics[-1]["numbers"].get("queue_limit") for r in run.ranks if r.metrics), None)
    rows = {str(lag): number(count) for lag, count in summary.lag_counts.items()}
    counts = pairs("Version lag of trained packs", rows, ("versions behind", "packs"))
    parts: list[Part | None] = [
        Chart(
            key="queue",
            title="Ready packs",
            description="Ready packs of the rank that has fewest, when a step has taken its own. In a long run "
            "a point is the least of several steps.",
            x_title="step",
            y_title="packs",
            series=(series_of("ready packs", Mark.STAIRS, thinned(depths, summary=min)),),
            limits=(Limit("queue_limit", limit),) if limit is not None else (),
        )
        if lags or limit
        else None,
        Chart(
            key="lag",
            title="Version lag",
            description="Versions between the learner and the oldest pack that a B step trained. In a long run "
            "a point is the most of several steps.",
            x_title="step",
            y_title="versions",
            series=(series_of("oldest pack trained", Mark.POINTS, thinned(lags, summary=max)),),
            limits=(Limit("version_window", knobs.version_window),)
            if knobs.version_window is not None
            else (),
        ),
        counts,
    ]
    found = filled(parts)
    return Section("queue", "Queue and version lag", found or (Sentence("There was no channel B."),))


def drops_section(summary: RunSummary) -> Section:
    """What was lost on the way, by cause."""
    rows = {name: number(total) for name, total in summary.drops.items()}
    table = pairs("Dropped, over all ranks", rows)
    return Section("drops", "Drops", filled([table]) or (Sentence("Nothing was dropped.", Tone.GOOD),))


def _wanted_and_run(first: RankRecords) -> Chart:
    steps = [first.steps[number] for number in sorted(first.steps)]
    places = [step["step"] for step in steps]
    wanted = accumulate(int(step["wants_b"]) for step in steps)
    ran = accumulate(int(step["channel"] == "B") for step in steps)
    return Chart(
        key="wanted",
        title="B steps, wanted and run",
        description="How many B steps the schedule had wanted, and how many had run, up to each step.",
        x_title="step",
        y_title="B steps so far",
        series=(
            series_of("wanted", Mark.STAIRS, sampled(list(zip(places, wanted, strict=True)))),
            series_of("run", Mark.STAIRS, sampled(list(zip(places, ran, strict=True)))),
        ),
    )
