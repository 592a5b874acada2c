"""Tells of a run's steps: wanted and run, queue, drops, where time went, sync rounds, how full packs were. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from swift_stage2.config.stage2_ab import PackingConfig
from swift_stage2.pages.content import (
    Chart,
    Limit,
    Mark,
    Part,
    Section,
    Sentence,
    Series,
    Table,
    Tone,
    filled,
    number,
    pairs,
    sampled,
    seconds,
    series_of,
    share,
    thinned,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.activity import NANOSECONDS, in_seconds
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.reading import RankRecords
from swift_stage2.telemetry.summary import RankActivity, RunSummary

_MAIN_THREAD = "Main thread, seconds by activity"
_NUM_BINS = 20
_GOOD_FILL = 0.8
_LENGTH_STEP = 256
_PACKING = ("stage2_ab", "channel_b", "packing")


def summary_parts(summary: RunSummary) -> tuple[Part, ...]:
    """The numbers of a summary alone, as the demo shows them."""
    ratios = {tag: f"{value:.3f}" for tag, value in summary.ratios.items()}
    whole = {"whole round": summary.round_seconds} if summary.round_seconds else {}
    return filled(
        [
            *_steps(summary),
            *_gaps(summary),
            _lags(summary),
            _drops(summary),
            pairs("Quality over the run", ratios),
            _rounds(summary),
            _by_phase("times", {**summary.phase_seconds, **whole}),
            _activities(_MAIN_THREAD, summary.activity),
        ]
    )


def steps_section(run: RunData, summary: RunSummary) -> Section:
    parts: list[Part] = list(_steps(summary))
    if not any(records.starts or records.steps for records in run.ranks):
        told = "There is no audit (audit/rank*.jsonl), so nothing of steps, times and rounds can be told."
        parts.append(Sentence(told, Tone.WARN))
    parts += _gaps(summary)
    if summary.num_b_wanted:
        parts.append(_wanted_and_run(run.first))
    return Section("steps", "What was wanted and what ran", filled(parts))


def _steps(summary: RunSummary) -> Iterator[Part]:
    rows = {
        "optimizer steps": number(summary.num_steps),
        "B wanted": number(summary.num_b_wanted),
        "B run": f"{summary.num_b_run}{share(summary.num_b_run, summary.num_b_wanted)}",
        "B skipped": number(sum(summary.skips.values())),
    }
    yield pairs("Steps", rows | {f"B skipped: {why}": number(count) for why, count in summary.skips.items()})
    if differing := summary.num_disagreements:
        yield Sentence(f"{differing} steps have plans that differ between ranks: a fault.", Tone.BAD)


def _gaps(summary: RunSummary) -> Iterator[Sentence]:
    """Gaps in the audit that all numbers but the account of samples are made from."""
    if summary.missing_ranks:
        missing = ", ".join(map(str, summary.missing_ranks))
        yield Sentence(f"The audit of rank {missing} is missing; it counts nowhere on this page.", Tone.WARN)
    if lost := summary.num_records_lost:
        yield Sentence(f"{lost} records of the audit were lost (full disk or damaged file).", Tone.WARN)


def _lags(summary: RunSummary) -> Table:
    rows = {str(lag): number(count) for lag, count in summary.lag_counts.items()}
    return pairs("Version lag of trained packs", rows, ("versions behind", "packs"))


def _drops(summary: RunSummary) -> Table:
    return pairs("Dropped, over all ranks", {name: number(total) for name, total in summary.drops.items()})


def _rounds(summary: RunSummary) -> Table | None:
    if not summary.num_rounds_committed + summary.num_rounds_failed:
        return None
    facts = {"committed": number(summary.num_rounds_committed), "failed": number(summary.num_rounds_failed)}
    if summary.num_caught_up:
        facts["servers caught up between rounds"] = number(summary.num_caught_up)
    facts |= {f"server added: {url}": f"at step {step}" for url, step in summary.added_servers.items()}
    facts |= {f"servers proven by {proof}": number(count) for proof, count in summary.proofs.items()}
    facts |= {f"weights carried by {name}": number(count) for name, count in summary.transports.items()}
    facts |= {f"server failed: {error}": number(count) for error, count in summary.server_errors.items()}
    return pairs("Sync rounds", facts)


def _wanted_and_run(first: RankRecords) -> Chart:
    steps = [first.steps[number] for number in sorted(first.steps)]
    wanted = accumulate(int(step["wants_b"]) for step in steps)
    ran = accumulate(int(step["channel"] == "B") for step in steps)
    return Chart(
        key="wanted",
        title="B steps, wanted and run",
        description="How many B steps the schedule had wanted, and how many had run, up to each step.",
        y_title="B steps so far",
        series=series_of(
            Mark.STAIRS,
            {
                name: sampled([(step["step"], total) for step, total in zip(steps, totals, strict=True)])
                for name, totals in (("wanted", wanted), ("run", ran))
            },
        ),
    )


def queue_section(run: RunData, version_window: int | None, summary: RunSummary) -> Section:
    numbers = sorted({number for records in run.ranks for number in records.steps})
    every = [[r.steps[number] for r in run.ranks if number in r.steps] for number in numbers]
    depths = [(s[0]["step"], min(step["queue_depth"] for step in s)) for s in every]
    lags = [
        (s[0]["step"], max(step["version_lag"] or 0 for step in s)) for s in every if s[0]["channel"] == "B"
    ]
    limit = next((r.metrics[-1]["numbers"].get("queue_limit") for r in run.ranks if r.metrics), None)
    packs = Chart(
        key="queue",
        title="Ready packs",
        description="Ready packs of the rank that has fewest, when a step has taken its own. In a long run "
        "a point is the least of several steps.",
        y_title="packs",
        series=series_of(Mark.STAIRS, {"ready packs": thinned(depths, min)}),
        limits=_limits("queue_limit", limit),
    )
    age = Chart(
        key="lag",
        title="Version lag",
        description="Versions between the learner and the oldest pack that a B step trained. In a long run "
        "a point is the most of several steps.",
        y_title="versions",
        series=series_of(Mark.POINTS, {"oldest pack trained": thinned(lags, max)}),
        limits=_limits("version_window", version_window),
    )
    found = filled([packs if lags or limit else None, age, _lags(summary)])
    return Section("queue", "Queue and version lag", found or (Sentence("There was no channel B."),))


def _limits(name: str, value: float | None) -> tuple[Limit, ...]:
    return () if value is None else (Limit(name, value),)


def drops_section(summary: RunSummary) -> Section:
    return Section(
        "drops", "Drops", filled([_drops(summary)]) or (Sentence("Nothing was dropped.", Tone.GOOD),)
    )


def time_section(run: RunData, summary: RunSummary, shown_rank: int) -> Section:
    """Where the main thread's and the pipeline's time went; the charts show ``shown_rank``."""
    pipeline = [
        RankActivity(records.rank, spent, (last.get("pipeline_wall_ns") or 0) / NANOSECONDS)
        for records in run.ranks
        for last in records.metrics[-1:]
        if (spent := in_seconds(last.get("pipeline_ns")))
    ]
    shown = next((records for records in run.ranks if records.rank == shown_rank), None)
    parts: list[Part | None] = [
        _activities(_MAIN_THREAD, summary.activity),
        _main_thread(shown) if shown else None,
        _activities("Pipeline thread, seconds by activity", pipeline),
        _pipeline(shown) if shown else None,
        None if pipeline else Sentence("The pipeline thread has no clock in this run."),
    ]
    return Section("time", "Where time went", filled(parts))


def _activities(title: str, ranks: Sequence[RankActivity]) -> Table:
    names = _spending([each.seconds for each in ranks])
    rows = []
    for each in ranks:
        total = sum(each.seconds.values())
        values = (
            f"{each.seconds.get(name, 0):.2f}{share(each.seconds.get(name, 0), total)}" for name in names
        )
        rows.append((str(each.rank), *values, f"{total:.2f}", f"{each.wall_s:.2f}"))
    return Table(title, ("rank", *names, "sum", "wall"), tuple(rows))


def _spending(every: Sequence[Mapping[str, float]]) -> list[str]:
    """Activities that took any time."""
    return list(dict.fromkeys(name for spent in every for name, value in spent.items() if value))


def _main_thread(records: RankRecords) -> Chart:
    begins = {start["step"] for start in records.starts}
    steps = [records.steps[number] for number in sorted(records.steps) if number not in begins]
    return Chart(
        key="main_thread",
        title=f"Main thread of rank {records.rank}, seconds per step",
        description="Seconds of the main thread from one plan to the next, by activity, one on top of another.",
        y_title="seconds",
        # A record is written when its step is planned: it tells of the step before.
        series=_stack([(step["step"] - 1, in_seconds(step["activity_ns"])) for step in steps]),
    )


def _pipeline(records: RankRecords) -> Chart:
    told = [
        (record["step"], spent)
        for record in records.metrics
        if record["step"] is not None and (spent := in_seconds(record.get("pipeline_ns")))
    ]
    shares = []
    for (_, before), (step, after) in pairwise(told):
        elapsed = sum(after.values()) - sum(before.values())
        if elapsed > 0:
            shares.append(
                (step, {name: 100 * (after[name] - before.get(name, 0)) / elapsed for name in after})
            )
    return Chart(
        key="pipeline",
        title=f"Pipeline thread of rank {records.rank}, share of time",
        description="What the pipeline thread did between two logging steps, in percent of its time.",
        y_title="percent",
        series=_stack(shares),
    )


def _stack(points: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[Series, ...]:
    names = _spending([spent for _, spent in points])
    return series_of(
        Mark.STACK,
        {name: thinned([(place, spent.get(name, 0.0)) for place, spent in points]) for name in names},
    )


def rounds_section(run: RunData, summary: RunSummary) -> Section:
    if not run.first.rounds:
        return Section("rounds", "Sync rounds", (Sentence("There was no sync round."),))
    by_phase: dict[str, list[tuple[float, float]]] = {}
    for record in run.first.rounds:
        for phase, spent in _phases(record).items():
            by_phase.setdefault(phase, []).append((record["step"], spent))
    spent_s = {phase: [spent for _, spent in points] for phase, points in by_phase.items()}
    chart = Chart(
        key="rounds",
        title="Seconds of a round, by phase",
        description="Canary, snapshot, and each phase of the slowest server; they overlap, so they do not add up.",
        y_title="seconds",
        series=series_of(Mark.LINE, {phase: thinned(points) for phase, points in by_phase.items()}),
    )
    return Section("rounds", "Sync rounds", filled([_rounds(summary), _by_phase("rounds", spent_s), chart]))


def _by_phase(counted: str, spent_s: Mapping[str, Sequence[float]]) -> Table:
    rows = tuple(
        (phase, number(len(spent)), *map(seconds, (statistics.median(spent), max(spent), sum(spent))))
        for phase, spent in spent_s.items()
    )
    return Table("Seconds by phase", ("phase", counted, "median", "longest", "total"), rows)


def _phases(record: Record) -> dict[str, float]:
    """Of one round; servers' phases as the slowest server took them."""
    spent = {
        "whole round": record["seconds"],
        "canary": record["canary_seconds"],
        "snapshot": record["snapshot_seconds"],
    }
    of_servers: dict[str, float] = {}
    for server in record["servers"].values():
        for phase, taken in server["seconds"].items():
            of_servers[phase] = max(taken, of_servers.get(phase, 0.0))
    return spent | of_servers


def fill_section(run: RunData) -> Section:
    packs = [
        record
        for record in run.ledger_records
        if record["kind"] == Entry.PACKED and record["capacity_tokens"]
    ]
    packed = [(record["num_tokens"], record["capacity_tokens"]) for record in packs]
    if not packed:
        return Section("fill", "Pack fill", (Sentence("No pack was made."),))
    fills = sorted(tokens / capacity for tokens, capacity in packed)
    rows = {
        "packs made": number(len(packed)),
        "tokens / room": f"{sum(t for t, _ in packed) / sum(c for _, c in packed):.1%}",
        "median fill": f"{fills[len(fills) // 2]:.1%}",
        "lowest fill": f"{fills[0]:.1%}",
    }
    counts = [0] * _NUM_BINS
    for fill in fills:
        counts[min(_NUM_BINS - 1, int(fill * _NUM_BINS))] += 1
    width = 100 / _NUM_BINS
    bars = [(width * (index + 0.5), float(count)) for index, count in enumerate(counts)]
    chart = Chart(
        key="fill",
        title="Packs by fill",
        description=f"How many packs were filled to what percent, in steps of {width:g}, each named by its middle.",
        x_title="percent of the room",
        y_title="packs",
        series=series_of(Mark.BARS, {"packs": bars}),
    )
    num_samples = sum(len(record["samples"]) for record in packs)
    advice = fill_advice(
        fills,
        segment_tokens=sum(tokens for tokens, _ in packed) / max(1, num_samples),
        capacity=max(capacity for _, capacity in packed),
        min_fill=run.number_setting(*_PACKING, "packing_min_fill_ratio"),
        b_ratio=run.number_setting("stage2_ab", "schedule", "b_ratio"),
    )
    told = Sentence(advice, Tone.WARN) if advice else None
    return Section("fill", "Pack fill", filled((told, pairs("Packs", rows), chart)))


def fill_advice(
    fills: Sequence[float],
    *,
    segment_tokens: float,
    capacity: int,
    min_fill: float | None,
    b_ratio: float | None,
) -> str:
    """Which key would fill the packs better, with a value; nothing where they are well filled.

    ``fills`` are shares of ``capacity`` tokens, ``segment_tokens`` the mean of the segments. A pack waits for a
    segment as long as one fits, so that room for about one stays empty.
    """
    mean = sum(fills) / len(fills)
    if mean >= _GOOD_FILL:
        return ""
    found = f"Packs are {mean:.0%} full on average"
    waited_for = PackingConfig().packing_min_fill_ratio if min_fill is None else min_fill
    num_early = sum(fill < waited_for for fill in fills)
    if 2 * num_early > len(fills):
        share = f"{mean * b_ratio:.2g}" if b_ratio else f"{mean:.2g} times what it is"
        return (
            f"{found}: {num_early} of {len(fills)} left below packing_min_fill_ratio {waited_for:g} because the queue "
            f"was starving. The same samples in full packs feed stage2_ab.schedule.b_ratio: {share}."
        )
    reachable = math.floor(100 * min(_GOOD_FILL + 0.1, 1 - segment_tokens / capacity)) / 100
    if reachable > max(waited_for, mean):
        return (
            f"{found}: they leave at packing_min_fill_ratio {waited_for:g}. With segments of {segment_tokens:.0f} "
            f"tokens, write {'.'.join(_PACKING)}.packing_min_fill_ratio: {reachable:g}."
        )
    longer = math.ceil(segment_tokens / (1 - _GOOD_FILL) / _LENGTH_STEP) * _LENGTH_STEP
    return (
        f"{found}: segments of {segment_tokens:.0f} tokens leave much of {capacity} empty. If memory allows, write "
        f"{'.'.join(_PACKING)}.packing_length: {max(longer, capacity + _LENGTH_STEP)}."
    )
