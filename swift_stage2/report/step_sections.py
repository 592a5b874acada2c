"""What was wanted and what ran, the queue and the age of its packs, and what was dropped. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from swift_stage2.report.course import Course, Knobs
from swift_stage2.report.run_data import RankRecords, RunData
from swift_stage2.report.steps_over_time import sampled, thinned

_PLAN = ("channel", "wants_b", "skip_reason", "version")
_DROPS = (
    "packs_dropped_stale",
    "packs_dropped_oldest",
    "segments_dropped_stale",
    "rollouts_failed",
    "rollouts_aborted",
)
_DROP_FAMILIES = ("samples_quarantined/", "objects_dropped/")


def steps_section(run: RunData, course: Course) -> Section:
    """What was wanted and what ran."""
    rows = {
        "optimizer steps": number(course.num_steps),
        "B wanted": number(course.num_b_wanted),
        "B run": f"{course.num_b_run}{share(course.num_b_run, course.num_b_wanted)}",
        "B skipped": number(sum(course.skips.values())),
    }
    rows |= {f"B skipped: {reason}": number(count) for reason, count in course.skips.items()}
    lost = sum(records.num_lost for records in run.ranks)
    parts: list[Part | None] = [
        pairs("Steps", rows),
        Sentence(f"{differing} steps have plans that differ between ranks: a fault.", Tone.BAD)
        if (differing := _disagreements(run.ranks))
        else None,
        Sentence(f"{lost} records of the audit were lost to a full disk.", Tone.WARN) if lost else None,
        _wanted_and_run(run.first) if run.first and course.num_b_wanted else None,
    ]
    return Section("steps", "What was wanted and what ran", filled(parts))


def queue_section(run: RunData, knobs: Knobs) -> Section:
    """Ready packs and the age of what was trained."""
    numbers = sorted({number for records in run.ranks for number in records.steps})
    every = [[r.steps[number] for r in run.ranks if number in r.steps] for number in numbers]
    depths = [(s[0]["step"], min(step["queue_depth"] or 0 for step in s)) for s in every]
    lags = [
        (s[0]["step"], max(step["version_lag"] or 0 for step in s)) for s in every if s[0]["channel"] == "B"
    ]
    limit = next((r.metrics[-1]["numbers"].get("queue_limit") for r in run.ranks if r.metrics), None)
    counts = pairs("Version lag of trained packs", _lag_rows(run.ranks), ("versions behind", "packs"))
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


def drops_section(run: RunData) -> Section:
    """What was lost on the way, by cause."""
    totals: dict[str, float] = {}
    for records in run.ranks:
        for name, total in (records.metrics[-1]["numbers"] if records.metrics else {}).items():
            if total and (name in _DROPS or name.startswith(_DROP_FAMILIES)):
                totals[name] = totals.get(name, 0) + total
    table = pairs("Dropped, over all ranks", {name: number(total) for name, total in totals.items()})
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


def _lag_rows(ranks: Sequence[RankRecords]) -> dict[str, str]:
    lags = Counter(
        step["version"] - pack["version"]
        for records in ranks
        for step in records.steps.values()
        for pack in step["packs"]
    )
    return {str(lag): number(count) for lag, count in sorted(lags.items())}


def _disagreements(ranks: Sequence[RankRecords]) -> int:
    first, *others = ranks or [RankRecords(0)]
    return sum(
        any(
            step[name] != other.steps[number][name]
            for other in others
            if number in other.steps
            for name in _PLAN
        )
        for number, step in first.steps.items()
    )
