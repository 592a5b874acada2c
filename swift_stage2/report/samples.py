"""Tells what became of every sample: the account of the logs, and each draw's fate in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from swift_stage2.pages.content import Part, Section, Sentence, Table, Tone, filled, pairs
from swift_stage2.telemetry.account import RankAccount, RunAccount
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import AnyEvent, Start
from swift_stage2.telemetry.sample_events import (
    Drawn,
    Key,
    Place,
    Quarantined,
    Returned,
    ReturnReason,
    SampleEvent,
    Trained,
    Unused,
)

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
        "rollouts resumed": rank.num_cut,
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
        known = f"{damaged} lines are damaged" if damaged else "the logs lack what checkpoints tell"
        return Sentence(
            f"not provable: {known}, so what is broken above may only be what they told", Tone.WARN
        )
    if account.num_violations:
        return Sentence(f"not balanced: {account.num_violations} rules are broken", Tone.BAD)
    has_ended = all(rank.has_ended for rank in account.ranks)
    has_unused = any(rank.unused for rank in account.ranks)
    ended = "quarantined, compared and unused" if has_unused else "quarantined"
    open_ended = "" if has_ended else "; up to the last record, for no end is told"
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


def fates_of(events: Iterable[AnyEvent]) -> dict[Key, str]:
    """By draw, its end in words, of one rank's effective history; of the draws that ended."""
    open_draws: dict[Place, Key] = {}
    fates: dict[Key, str] = {}
    for event in events:
        if isinstance(event, Start):
            open_draws.clear()  # ended by a kill
        for key in event.samples if isinstance(event, SampleEvent) else ():
            if isinstance(event, Drawn):
                open_draws[key[:2]] = key
            elif (fate := _fate(event)) and (drawn := open_draws.pop(key[:2], None)) is not None:
                fates[drawn] = fate
    return fates


def _fate(event: AnyEvent) -> str:
    """The end that an event gives to its samples' draws, in words; empty if it gives none."""
    match event:
        case Returned(reason=ReturnReason.STOPPED):
            return "not trained, the run ended"
        case Returned():
            return f"not trained, asked again: {event.reason}"
        case Trained():
            return f"trained at step {event.step}"
        case Quarantined():
            return f"given up: {event.reason}"
        case Unused():
            return f"compared, and nothing trained of it: {event.reason}"
    return ""
