"""Tells what became of every sample, and compares whom a run trained with whom it did not. Pure.

A pipeline that drops what is late could train on easy images only, and no loss would show it. Two questions, each for
the number of objects, the pixels and the tokens of the rollout: are the samples that were given up unlike those that
were trained, and are the draws whose rollout was thrown away unlike those that were used? Answered by the two-sided
Mann-Whitney U test (Mann and Whitney, 1947) with correction for ties; the limit on p is divided by the number of tests
(Bonferroni). Read from ledgers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from swift_stage2.pages.content import Part, Section, Sentence, Table, Tone, filled, pairs
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry, ReturnReason
from swift_stage2.telemetry.ledger_account import Key, RankAccount, RunAccount, ledger_key
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


_FEWEST = 8  # in each group, below which no test is made
_LIMIT_ON_P = 0.05
_REMEDIES = {
    "stale": "raise prefetch.version_window or prefetch.sync_every_steps",
    "overflow": "lower prefetch.prefetch_target_packs",
    "timed_out": "raise rollout.request_timeout_s or lower rollout.decoding.max_new_tokens",
    "aborted": "write rollout.sync.on_pending: resume where all servers are ours, or wait",
    "failed": "read the servers' logs",
    str(Entry.QUARANTINED): "see its reasons above; too_slow ends with a longer rollout.request_timeout_s",
}


_NOT_DROPPED = (Entry.TRAINED, Entry.QUARANTINED, Entry.UNUSED)


class Trait(StrEnum):
    OBJECTS = "objects"
    PIXELS = "pixels"
    ROLLOUT_TOKENS = "rollout tokens"


class Level(StrEnum):
    """Who is compared with those that were trained."""

    SAMPLES = "given up"
    """Samples: the quarantined."""
    DRAWS = "dropped"
    """Draws whose rollout was thrown away; the sample was drawn again."""


@dataclass(slots=True)
class Draw:
    """One draw of a sample, and its end: "trained", "quarantined", "unused", or the reason for which it returned."""

    num_objects: int | None = None
    num_pixels: int | None = None
    num_rollout_tokens: int | None = None
    end: str = ""
    key: Key | None = field(default=None, compare=False)
    fate: str = field(default="", compare=False)
    """The same end in words."""

    def value(self, trait: Trait) -> int | None:
        """The trait, None where it never became known."""
        known: int | None = getattr(self, f"num_{trait.name.lower()}")
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One side of a comparison; quartiles are None of an empty group."""

    size: int
    unknown: int
    """Further ones whose trait never became known."""
    quartiles: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One trait at one level. ``issued`` are both others together."""

    level: Level
    trait: Trait
    issued: Group
    trained: Group
    others: Group
    share_larger: float | None
    """Of all pairs, how often the other is larger than the trained one, ties counted half; 0.5 if they are alike."""
    p_value: float | None
    """None if a group is too small for a test."""
    differs: bool
    main_end: str | None
    """How most of the others ended."""


def draws_of(records: Iterable[Record]) -> list[Draw]:
    """The draws that ended, of one rank's effective history."""
    open_draws: dict[tuple[int, int], Draw] = {}
    ended: list[Draw] = []
    for record in records:
        kind = record["kind"]
        if kind == Entry.START:
            open_draws.clear()  # ended by a kill: nobody chose them
        for number, sample in enumerate(record.get("samples", ())):
            place = (sample[0], sample[1])
            if kind == Entry.DRAWN:
                open_draws[place] = Draw(key=ledger_key(sample))
            elif (draw := open_draws.get(place)) is not None and _tell(draw, record, number):
                ended.append(open_draws.pop(place))
    return ended


def compare(draws: Sequence[Draw]) -> tuple[Comparison, ...]:
    trained = [draw for draw in draws if draw.end == Entry.TRAINED]
    others = {
        Level.SAMPLES: [draw for draw in draws if draw.end == Entry.QUARANTINED],
        Level.DRAWS: [draw for draw in draws if draw.end not in _NOT_DROPPED],
    }
    num_tests = len(Level) * len(Trait)
    return tuple(
        _compare(level, trait, trained, others[level], _LIMIT_ON_P / num_tests)
        for level in Level
        for trait in Trait
    )


def warnings(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """A sentence for every comparison that differs: what, by how much, and what would help."""
    for found in comparisons:
        if not found.differs or found.others.quartiles is None or found.trained.quartiles is None:
            continue
        side = "more" if (found.share_larger or 0.0) > 0.5 else "fewer"
        yield (
            f"what is {found.level} has {side} {found.trait} than what is trained: median "
            f"{found.others.quartiles[1]:g} against {found.trained.quartiles[1]:g}, p={found.p_value:.1g}; most ended "
            f"{found.main_end}: {_REMEDIES.get(found.main_end or '', 'see the ledger for its messages')}"
        )


def _tell(draw: Draw, record: Record, number: int) -> bool:
    """Adds what a record says of a draw; whether the draw has ended."""
    match record["kind"]:
        case Entry.READ:
            draw.num_objects, draw.num_pixels = record["num_objects"][number], record["num_pixels"][number]
        case Entry.MATCHED:
            draw.num_rollout_tokens = record["num_rollout_tokens"]
        case Entry.RETURNED:
            reason = record["reason"]
            why = "the run ended" if reason == ReturnReason.STOPPED else f"asked again: {reason}"
            draw.end, draw.fate = reason, f"not trained, {why}"
        case Entry.TRAINED:
            draw.end, draw.fate = record["kind"], f"trained at step {record['step']}"
        case Entry.QUARANTINED:
            draw.end, draw.fate = record["kind"], f"given up: {record['reason']}"
        case Entry.UNUSED:
            draw.end, draw.fate = record["kind"], f"compared, and nothing trained of it: {record['reason']}"
    return bool(draw.end)


def _compare(
    level: Level, trait: Trait, trained: Sequence[Draw], others: Sequence[Draw], limit_on_p: float
) -> Comparison:
    mine = [value for draw in trained if (value := draw.value(trait)) is not None]
    theirs = [value for draw in others if (value := draw.value(trait)) is not None]
    share_larger, p_value = _test(mine, theirs)
    ends = Counter(draw.end for draw in others if draw.value(trait) is not None)
    return Comparison(
        level=level,
        trait=trait,
        issued=_group([*mine, *theirs], len(trained) + len(others)),
        trained=_group(mine, len(trained)),
        others=_group(theirs, len(others)),
        share_larger=share_larger,
        p_value=p_value,
        differs=p_value is not None and p_value < limit_on_p,
        main_end=max(ends, key=ends.__getitem__) if ends else None,
    )


def _test(mine: Sequence[int], theirs: Sequence[int]) -> tuple[float | None, float | None]:
    if min(len(mine), len(theirs)) < _FEWEST:
        return None, None
    if len({*mine, *theirs}) == 1:
        return 0.5, 1.0  # the test's variance is zero
    from scipy.stats import mannwhitneyu  # takes a second to load

    found = mannwhitneyu(theirs, mine, alternative="two-sided", method="asymptotic")
    return float(found.statistic) / (len(mine) * len(theirs)), float(found.pvalue)


def _group(values: Sequence[int], size: int) -> Group:
    quartiles = tuple(np.quantile(values, (0.25, 0.5, 0.75)).tolist()) if values else None
    return Group(size=len(values), unknown=size - len(values), quartiles=quartiles)


def selection_section(comparisons: Iterable[Comparison]) -> Section:
    """Comparisons without anybody on the other side are left out; one sentence if that leaves none."""
    met = [found for found in comparisons if found.others.size + found.others.unknown]
    parts: list[Part] = [Sentence("selection: nothing was dropped or given up")]
    if met:
        headings = ("against", "by", "issued", "trained", "the others", "others larger", "p")
        tones = {index: Tone.WARN for index, found in enumerate(met) if found.differs}
        told = [Sentence(f"! {sentence}", Tone.WARN) for sentence in warnings(met)]
        parts = [
            Table("Selection: median (quartiles) × number", headings, tuple(map(_row, met)), tones),
            *(told or [Sentence("selection: no difference beyond chance", Tone.GOOD)]),
        ]
    return Section("selection", "Whom the run trained", tuple(parts))


def _row(found: Comparison) -> tuple[str, ...]:
    return (
        str(found.level),
        str(found.trait),
        _shown(found.issued),
        _shown(found.trained),
        _shown(found.others),
        "–" if found.share_larger is None else f"{found.share_larger:.0%} of pairs",
        "too few" if found.p_value is None else f"{found.p_value:.2g}",
    )


def _shown(group: Group) -> str:
    unknown = f", {group.unknown} unknown" if group.unknown else ""
    if group.quartiles is None:
        return f"– × 0{unknown}"
    low, middle, high = group.quartiles
    spread = "" if low == high else f" ({low:g}..{high:g})"
    return f"{middle:g}{spread} × {group.size}{unknown}"
