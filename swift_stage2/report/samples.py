"""Tells what became of every sample: the account of the ledgers, and each draw's fate in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from swift_stage2.pages.content import Part, Section, Sentence, Table, Tone, filled, pairs
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry, ReturnReason
from swift_stage2.telemetry.ledger_account import Key, Place, RankAccount, RunAccount, ledger_key
from swift_stage2.telemetry.reading import RankRecords

_MOST_SAMPLES = 8  # of one broken rule
_MOST_PLACES = 100


def account_section(account: RunAccount | None, ranks: Iterable[RankRecords], *, had_no_b: bool) -> Section:
    """The whole answer; None is a run without a ledger, which is right if it is known that it ``had_no_b``."""
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
    elif had_no_b:
        parts = (Sentence("There was no channel B, so there is no sample to account for."),)
    else:
        text = "not provable: there is no ledger, and the audit does not show that there was no channel B"
        parts = (Sentence(text, Tone.WARN),)
    given_up = _given_up(record for records in ranks for record in records.quarantines)
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
        lost = sum(rank.num_records_lost for rank in account.ranks)
        known = f"{lost} records were lost" if lost else "the ledger lacks what others tell"
        return Sentence(
            f"not provable: {known} (full disk or damaged file), so what is broken above may only be what they told",
            Tone.WARN,
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


def _given_up(quarantines: Iterable[Record]) -> Table:
    """A row per place and reason, the commonest first."""
    told = Counter(_place(record) for record in quarantines)
    rows = tuple(
        (place, image, reason, str(count), message)
        for (place, image, reason, message), count in told.most_common(_MOST_PLACES)
    )
    title = "Samples given up"
    if len(told) > len(rows):
        title += f": {len(rows)} of {len(told):,} places"
    headings = ("file and line", "image", "reason", "times", "message")
    return Table(title, headings, rows, dict.fromkeys(range(len(rows)), Tone.WARN), ends_in_words=True)


def _place(record: Record) -> tuple[str, str, str, str]:
    file, sample, images = record.get("file"), record.get("sample"), record.get("images")
    row = sample.get("index", "?") if isinstance(sample, dict) else "?"
    place = f"row {row} of ms-swift's set" if file is None else f"{file}:{record.get('line')}"
    named = [str(image) for image in images if image is not None] if isinstance(images, list) else []
    return place, ", ".join(named), str(record.get("reason", "")), str(record.get("message", ""))


def fates_of(records: Iterable[Record]) -> dict[Key, str]:
    """By draw, its end in words, of one rank's effective history; of the draws that ended."""
    open_draws: dict[Place, Key] = {}
    fates: dict[Key, str] = {}
    for record in records:
        if record["kind"] == Entry.START:
            open_draws.clear()  # ended by a kill
        for key in map(ledger_key, record.get("samples", ())):
            if record["kind"] == Entry.DRAWN:
                open_draws[key[:2]] = key
            elif (fate := _fate(record)) and (drawn := open_draws.pop(key[:2], None)) is not None:
                fates[drawn] = fate
    return fates


def _fate(record: Record) -> str:
    """The end that a record gives to its samples' draws, in words; empty if it gives none."""
    match record["kind"]:
        case Entry.RETURNED if record["reason"] == ReturnReason.STOPPED:
            return "not trained, the run ended"
        case Entry.RETURNED:
            return f"not trained, asked again: {record['reason']}"
        case Entry.TRAINED:
            return f"trained at step {record['step']}"
        case Entry.QUARANTINED:
            return f"given up: {record['reason']}"
        case Entry.UNUSED:
            return f"compared, and nothing trained of it: {record['reason']}"
    return ""
