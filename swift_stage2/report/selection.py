"""Compares whom a run trained with whom it did not, by what makes a rollout slow. Pure.

A pipeline that drops what is late could train on easy images only, and no loss would show it. Two questions, each for
the number of objects, the pixels and the tokens of the rollout: are the samples that were given up unlike those that
were trained, and are the draws whose rollout was thrown away unlike those that were used? Answered by the two-sided
Mann-Whitney U test (Mann and Whitney, 1947) with correction for ties; the limit on p is divided by the number of tests
(Bonferroni). Read from ledgers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.stats import mannwhitneyu

from swift_stage2.report.content import Part, Section, Sentence, Table, Tone
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry

_FEWEST = 8  # in each group, below which no test is made
_LIMIT_ON_P = 0.05
_REMEDIES = {
    "stale": "raise prefetch.version_window or prefetch.sync_every_steps",
    "overflow": "lower prefetch.prefetch_target_packs",
    "timed_out": "raise rollout.request_timeout_s or lower rollout.decoding.max_new_tokens",
    "aborted": "write rollout.sync.on_pending: wait",
    "failed": "read the servers' logs",
    str(Entry.QUARANTINED): "see its reasons above; too_slow ends with a longer rollout.request_timeout_s",
}


class Trait(StrEnum):
    """What is compared."""

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
    """One draw of a sample, and how it ended: "trained", "quarantined", or the reason for which it returned."""

    num_objects: int | None = None
    num_pixels: int | None = None
    num_rollout_tokens: int | None = None
    end: str = ""

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
                open_draws[place] = Draw()
            elif (draw := open_draws.get(place)) is not None and _tell(draw, record, number):
                ended.append(open_draws.pop(place))
    return ended


def compare(draws: Sequence[Draw]) -> tuple[Comparison, ...]:
    """Every trait at every level."""
    trained = [draw for draw in draws if draw.end == Entry.TRAINED]
    others = {
        Level.SAMPLES: [draw for draw in draws if draw.end == Entry.QUARANTINED],
        Level.DRAWS: [draw for draw in draws if draw.end not in (Entry.TRAINED, Entry.QUARANTINED)],
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
            draw.end = record["reason"]
        case Entry.TRAINED | Entry.QUARANTINED:
            draw.end = record["kind"]
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
