"""Tells of a run's steps (wanted and run, drops, time, queue and version lag, sync rounds) and of its samples. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from swift_stage2.report.content import (
    Part,
    Section,
    Sentence,
    Table,
    Tone,
    filled,
    format_number,
    format_seconds,
    format_share,
    pairs,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.account import RankAccount, RunAccount
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import (
    Quarantined,
)
from swift_stage2.telemetry.summary import RunSummary
from swift_stage2.telemetry.timing import in_seconds


def steps_section(summary: RunSummary) -> Section:
    rows = {
        "optimizer steps": format_number(summary.num_steps),
        "B wanted": format_number(summary.num_b_wanted),
        "B run": f"{summary.num_b_run}{format_share(summary.num_b_run, summary.num_b_wanted)}",
        "B skipped": format_number(sum(summary.skips.values())),
        **{f"B skipped: {why}": format_number(count) for why, count in summary.skips.items()},
    }
    parts: list[Part] = [pairs("Steps", rows)]
    if differing := summary.num_disagreements:
        parts.append(Sentence(f"{differing} steps have plans that differ between ranks: a fault.", Tone.BAD))
    drops = {name: format_number(total) for name, total in summary.drops.items()}
    parts.append(pairs("Dropped, over all ranks", drops))
    return Section("steps", "What was wanted and what ran", filled(parts))


def _rounds(summary: RunSummary) -> Table | None:
    if not summary.num_rounds_committed + summary.num_rounds_failed:
        return None
    facts = {
        "committed": format_number(summary.num_rounds_committed),
        "failed": format_number(summary.num_rounds_failed),
    }
    if gaps := summary.steps_between_versions:
        facts["optimizer steps between two, median and most"] = f"{statistics.median(gaps):g}, {max(gaps)}"
    if summary.num_caught_up:
        facts["servers caught up between rounds"] = format_number(summary.num_caught_up)
    facts |= {f"servers proven by {proof}": format_number(count) for proof, count in summary.proofs.items()}
    facts |= {
        f"weights carried by {name}": format_number(count) for name, count in summary.transports.items()
    }
    facts |= {
        f"server failed: {error}": format_number(count) for error, count in summary.server_errors.items()
    }
    return pairs("Sync rounds", facts)


def queue_section(run: RunData, summary: RunSummary) -> Section:
    """Ready packs once each step had taken its own, and how old the packs were that were trained."""
    limit = run.first.start.queue_limit if run.first.start is not None else None
    depths = [
        min(rank.steps[step].queue_depth for rank in run.ranks if step in rank.steps)
        for step in run.first.steps
    ]
    packs = {"most that it holds": format_number(limit)}
    if depths:
        packs |= {"median": format_number(statistics.median(depths)), "least": format_number(min(depths))}
    lags = {str(lag): format_number(count) for lag, count in summary.lag_counts.items()}
    parts = filled(
        [
            pairs("Ready packs of the rank with fewest", packs) if limit else None,
            pairs("Version lag of trained packs", lags, ("versions behind", "packs")),
        ]
    )
    return Section("queue", "Queue and version lag", parts)


def time_section(run: RunData, summary: RunSummary) -> Section:
    """Where the main thread's and the pipeline's time went."""
    last = {rank.rank: rank.metrics for rank in run.ranks if rank.metrics is not None}
    pipeline = {rank: in_seconds(each.pipeline_ns) for rank, each in last.items() if each.pipeline_ns}
    parts = [
        _activities("Main thread, seconds by activity", summary.activity),
        _activities("Pipeline thread, seconds by activity", pipeline),
    ]
    return Section("time", "Where time went", filled(parts))


def _activities(title: str, spent: Mapping[int, Mapping[str, float]]) -> Table:
    """A row per rank."""
    names = dict.fromkeys(name for each in spent.values() for name, seconds in each.items() if seconds)
    rows = []
    for rank, each in spent.items():
        total = sum(each.values())
        values = (f"{each.get(name, 0):.2f}{format_share(each.get(name, 0), total)}" for name in names)
        rows.append((str(rank), *values, f"{total:.2f}"))
    return Table(title, ("rank", *names, "all"), tuple(rows))


def rounds_section(summary: RunSummary) -> Section:
    return Section("rounds", "Sync rounds", filled([_rounds(summary), _by_phase(summary)]))


def _by_phase(summary: RunSummary) -> Table:
    """Of the whole round, and of each phase at one server; phases overlap, so they do not add up."""
    spent_s: dict[str, Sequence[float]] = {**summary.phase_seconds}
    if summary.round_seconds:
        spent_s["whole round"] = summary.round_seconds
    rows = tuple(
        (
            phase,
            format_number(len(spent)),
            *map(format_seconds, (statistics.median(spent), max(spent), sum(spent))),
        )
        for phase, spent in spent_s.items()
    )
    return Table("Seconds by phase", ("phase", "times", "median", "longest", "total"), rows)


_MOST_SAMPLES = 8  # of one broken rule
_MOST_PLACES = 100


def account_section(account: RunAccount | None, ranks: Iterable[RankEvents]) -> Section:
    """The whole answer; None is a run without channel B."""
    parts: tuple[Part, ...]
    if account is not None:
        parts = (
            _ranks(account.ranks),
            _counts("In hand", (rank.in_hand for rank in account.ranks)),
            _counts("Quarantined, by reason", (rank.quarantined for rank in account.ranks)),
            _counts("Unused after comparison, by reason", (rank.unused for rank in account.ranks)),
            _counts("Returned and redrawn, by reason", (rank.returned for rank in account.ranks)),
            *_violations(account),
            *(Sentence(f"missing: {doubt}", Tone.WARN) for doubt in account.doubts),
            _verdict(account),
        )
    else:
        parts = (Sentence("There was no channel B, so there is no sample to account for."),)
    given_up = _given_up(event for rank in ranks for event in rank.of(Quarantined))
    return Section("ledger", "Was anything lost?", filled((*parts, given_up)))


def _ranks(ranks: Sequence[RankAccount]) -> Table:
    rows = [(str(rank.rank), _numbers(rank)) for rank in ranks]
    sums = {name: sum(numbers[name] for _, numbers in rows) for name in rows[0][1]}
    seldom = ("taken over", "unused", "rollouts resumed")
    shown = [name for name, total in sums.items() if total or name not in seldom]
    rows += [("all", sums)] if len(rows) > 1 else []
    return Table(
        "Samples of channel B",
        ("rank", *shown),
        tuple((rank, *(str(numbers[name]) for name in shown)) for rank, numbers in rows),
    )


def _numbers(rank: RankAccount) -> dict[str, int]:
    return {
        "taken over": rank.taken_over,
        "drawn": rank.drawn,
        "trained": rank.trained,
        "quarantined": sum(rank.quarantined.values()),
        "unused": sum(rank.unused.values()),
        "in hand": sum(rank.in_hand.values()),
        "resumes": rank.num_resumes,
        "void": rank.num_void,
    }


def _counts(title: str, parts: Iterable[Mapping[str, int]]) -> Table:
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part)
    return pairs(title, {name: str(count) for name, count in totals.items()}, ("", "samples"))


def _violations(account: RunAccount) -> Iterator[Sentence]:
    """Broken rules, with samples as epoch:position:row."""
    told = [("", violation) for violation in account.violations]
    told += [(f"rank {rank.rank}: ", violation) for rank in account.ranks for violation in rank.violations]
    for whose, violation in told:
        names = [f"{epoch}:{position}:{row}" for epoch, position, row, _ in violation.samples]
        shown, more = ", ".join(names[:_MOST_SAMPLES]), len(names) - _MOST_SAMPLES
        text = f"broken: {whose}{violation.rule}{': ' if names else ''}{shown}"
        yield Sentence(f"{text} and {more} more" if more > 0 else text, Tone.BAD)


def _verdict(account: RunAccount) -> Sentence:
    if not account.is_provable:
        damaged = sum(rank.num_damaged for rank in account.ranks)
        known = f"damaged lines: {damaged}" if damaged else "the logs lack what checkpoints tell"
        return Sentence(
            f"not provable: {known}, so what is broken above may only be what they told", Tone.WARN
        )
    if account.num_violations:
        return Sentence(f"not balanced, broken rules: {account.num_violations}", Tone.BAD)
    has_ended = all(rank.has_ended for rank in account.ranks)
    has_unused = any(rank.unused for rank in account.ranks)
    ended = "quarantined, compared and unused" if has_unused else "quarantined"
    open_ended = "" if has_ended else "; up to the last event, for no end is told yet"
    return Sentence(
        f"balanced: every sample drawn was trained once, {ended}, or is in hand{open_ended}", Tone.GOOD
    )


def _given_up(quarantines: Iterable[Quarantined]) -> Table:
    """A row per place and reason, the commonest first."""
    told = Counter(_place(event) for event in quarantines)
    rows = tuple(
        (place, image, reason, str(count), message)
        for (place, image, reason, message), count in told.most_common(_MOST_PLACES)
    )
    title = "Samples given up"
    if len(told) > len(rows):
        title += f": {len(rows)} of {len(told):,} places"
    headings = ("file and line", "image", "reason", "times", "message")
    return Table(title, headings, rows, dict.fromkeys(range(len(rows)), Tone.WARN), ends_in_words=True)


def _place(event: Quarantined) -> tuple[str, str, str, str]:
    ((_, _, row, _), *_) = event.samples
    place = f"row {row} of ms-swift's set" if event.file is None else f"{event.file}:{event.line}"
    named = ", ".join(image for image in event.images if image is not None)
    return place, named, event.reason, event.message
