"""Turns the account of samples into a section: a row per rank, broken rules, samples given up, a verdict. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from swift_stage2.report.content import Part, Section, Sentence, Table, Tone, filled, pairs
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger_account import RunAccount
from swift_stage2.telemetry.ledger_replay import Key, RankAccount, Violation
from swift_stage2.telemetry.rank_records import RankRecords

_MOST_SAMPLES_SHOWN = 8
_COLUMNS = ("rank", "taken over", "drawn", "trained", "quarantined", "in hand", "resumes", "void")
_TITLE = "Was anything lost?"


def ledger_section(account: RunAccount | None, *, had_no_b: bool) -> Section:
    """The whole answer; None is a run without a ledger, which is right if it is known that it ``had_no_b``."""
    if account is None:
        absent = (
            Sentence("There was no channel B, so there is no sample to account for.")
            if had_no_b
            else Sentence(
                "not provable: there is no ledger, and the audit does not show that there was no channel B",
                Tone.WARN,
            )
        )
        return Section("ledger", _TITLE, (absent,))
    parts: tuple[Part, ...] = (
        _ranks(account.ranks),
        _counts("In hand", (rank.in_hand for rank in account.ranks)),
        _counts("Quarantined, by reason", (rank.quarantined for rank in account.ranks)),
        _counts("Returned and redrawn, by reason", (rank.returned for rank in account.ranks)),
        *_violations(account),
        *(Sentence(f"missing: {doubt}", Tone.WARN) for doubt in account.doubts),
        _verdict(account),
    )
    return Section("ledger", _TITLE, filled(parts))


def _ranks(ranks: Sequence[RankAccount]) -> Table:
    rows = [_numbers(rank) for rank in ranks]
    sums = [sum(row[1][column] for row in rows) for column in range(len(_COLUMNS) - 1)]
    shown = [column for column, total in enumerate(sums) if total or _COLUMNS[column + 1] != "taken over"]
    rows += [("all", sums)] if len(rows) > 1 else []
    return Table(
        "Samples of channel B",
        (_COLUMNS[0], *(_COLUMNS[column + 1] for column in shown)),
        tuple((name, *(str(numbers[column]) for column in shown)) for name, numbers in rows),
    )


def _numbers(rank: RankAccount) -> tuple[str, list[int]]:
    quarantined, in_hand = sum(rank.quarantined.values()), sum(rank.in_hand.values())
    return str(rank.rank), [
        rank.taken_over,
        rank.drawn,
        rank.trained,
        quarantined,
        in_hand,
        rank.num_resumes,
        rank.num_void,
    ]


def _counts(title: str, parts: Iterable[Mapping[str, int]]) -> Table:
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part)
    return pairs(title, {name: str(count) for name, count in totals.items()}, ("", "samples"))


def _violations(account: RunAccount) -> Iterator[Sentence]:
    for violation in account.violations:
        yield _sentence("", violation)
    for rank in account.ranks:
        for violation in rank.violations:
            yield _sentence(f"rank {rank.rank}: ", violation)


def _sentence(whose: str, violation: Violation) -> Sentence:
    text = f"broken: {whose}{violation.rule}"
    return Sentence(f"{text}: {_names(violation.samples)}" if violation.samples else text, Tone.BAD)


def _names(samples: Sequence[Key]) -> str:
    """Each as epoch:position:row."""
    shown = ", ".join(
        f"{epoch}:{position}:{row}" for epoch, position, row, _ in samples[:_MOST_SAMPLES_SHOWN]
    )
    more = len(samples) - _MOST_SAMPLES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


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
    open_ended = (
        "" if all(rank.has_ended for rank in account.ranks) else "; up to the last record, for no end is told"
    )
    return Sentence(
        f"balanced: every sample drawn was trained once, quarantined, or is in hand{open_ended}", Tone.GOOD
    )


_MOST_SHOWN = 100
_HEADINGS = ("file and line", "image", "reason", "times", "message")


def with_quarantines(section: Section, ranks: Iterable[RankRecords]) -> Section:
    """The section with a row per place and reason at its end; itself where no sample was given up."""
    told = Counter(_described(record) for records in ranks for record in records.quarantines)
    if not told:
        return section
    rows = [
        (place, image, reason, str(count), message)
        for (place, image, reason, message), count in told.most_common(_MOST_SHOWN)
    ]
    title = "Samples given up"
    if len(told) > len(rows):
        title += f": {len(rows)} of {len(told):,} places"
    tones = dict.fromkeys(range(len(rows)), Tone.WARN)
    return Section(
        section.key, section.title, (*section.parts, Table(title, _HEADINGS, tuple(rows), tones, True))
    )


def _described(record: Record) -> tuple[str, str, str, str]:
    file, line = record.get("file"), record.get("line")
    place = (
        f"{file}:{line}" if file is not None else f"row {_row_number(record.get('sample'))} of ms-swift's set"
    )
    images = record.get("images")
    named = [str(image) for image in images if image is not None] if isinstance(images, list) else []
    return place, ", ".join(named), str(record.get("reason", "")), str(record.get("message", ""))


def _row_number(sample: Any) -> Any:
    return sample.get("index", "?") if isinstance(sample, dict) else "?"
