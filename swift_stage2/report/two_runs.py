"""Two runs side by side: verdicts, settings that differ, losses, and evaluations at equal steps on the same rows.

Differences of metrics have paired intervals (``evaluate.intervals``): both runs see the same drawn rows. Pure, but for
the images that it opens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from swift_stage2.detections.scores import DetectionScores
from swift_stage2.evaluate.intervals import (
    DEFAULT_DRAWS,
    Interval,
    affordable_draws,
    difference,
    intervals,
)
from swift_stage2.evaluate.sections import comparison_sections, told_apart
from swift_stage2.pages.content import (
    Chart,
    Mark,
    Part,
    Section,
    Sentence,
    Table,
    Tone,
    banded,
    filled,
    number,
    seconds,
    series_of,
    share,
    thinned,
)
from swift_stage2.pages.page import PageContent
from swift_stage2.pages.pictures import GALLERY_KEY, Gallery
from swift_stage2.report.disagreements import disagreements
from swift_stage2.report.evaluations import (
    BAND_DRAWS,
    RowEvaluation,
    evaluations_of,
    image_f1,
    scores_of,
    spread,
)
from swift_stage2.report.matches import LoggedMatch, matches_of
from swift_stage2.report.report import account_of_run, state_of
from swift_stage2.report.run_data import RunData
from swift_stage2.report.speed import Speed, slowest, works_of
from swift_stage2.telemetry.summary import RunSummary, summary_of

_CURVES = {"eval/f1": "F1"}
_OF_PIXELS = ("_small", "_medium", "_large")  # boxes are in the space in which they were matched
_MOST_CHARACTERS = 120
_MOST_SETTINGS = 200


@dataclass(frozen=True)
class _Side:
    run: RunData
    name: str
    """By which it is told from the other."""

    @cached_property
    def summary(self) -> RunSummary:
        return summary_of(self.run.ranks)

    @cached_property
    def speed(self) -> Speed | str:
        return slowest(works_of(self.run))

    @cached_property
    def is_balanced(self) -> bool:
        return account_of_run(self.run)[1]

    @cached_property
    def evaluations(self) -> list[RowEvaluation]:
        matches = matches_of(chain.from_iterable(records.matches for records in self.run.ranks))[0]
        return evaluations_of(self.run, matches)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both runs' answers to the same rows, at one step."""

    step: int
    matches: tuple[Sequence[LoggedMatch], Sequence[LoggedMatch]]
    scores: tuple[DetectionScores, DetectionScores]
    num_rows: tuple[int, int]
    """That either run answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison(PageContent):
    is_balanced: tuple[bool, bool]
    """Whether it is proven of each that no sample was lost."""


def compare_runs(first: RunData, second: RunData, gallery_size: int) -> RunComparison:
    """Computes the comparison; opens at most ``gallery_size`` images."""
    names = told_apart(first.run_dirs[-1], second.run_dirs[-1])
    sides = _Side(first, names[0]), _Side(second, names[1])
    pairs = list(_pairs(*sides))
    matches = pairs[-1].matches if pairs else ((), ())
    f1 = [image_f1(each) for each in pairs[-1].scores] if pairs else [np.zeros(0), np.zeros(0)]
    gallery = disagreements(names, matches, f1, gallery_size)
    return RunComparison(
        heading="Two runs compared",
        places=tuple(", ".join(map(str, run.run_dirs)) for run in (first, second)),
        state="; ".join(f"{side.name}: {state_of(side.run)}" for side in sides),
        sections=(
            Section("verdict", "Verdicts", (_verdicts(sides),)),
            Section("settings", "Settings that differ", filled(_settings(sides))),
            Section("loss", "Loss", filled((*_last_losses(sides), _losses(sides)))),
            *_evaluations(sides, pairs),
            Section(GALLERY_KEY, "Where they disagree most", (_shown(gallery, pairs),)),
        ),
        galleries={GALLERY_KEY: gallery},
        is_balanced=(sides[0].is_balanced, sides[1].is_balanced),
    )


def _verdicts(sides: tuple[_Side, _Side]) -> Table:
    told = [dict(_verdict(side)) for side in sides]
    names = list(dict.fromkeys(chain.from_iterable(told)))
    rows = tuple((name, *(each.get(name, "–") for each in told)) for name in names)
    return Table("", ("what", *(side.name for side in sides)), rows)


def _verdict(side: _Side) -> Iterator[tuple[str, str]]:
    summary, speed = side.summary, side.speed
    if isinstance(speed, Speed):
        yield "speed-up, computed", f"{speed.speed_up:.2f} ×"
        yield "bound", f"{speed.bound:.2f} ×"
        yield "reached", f"{min(1.0, speed.fraction):.0%}"
        yield "training part, steps and rounds", seconds(speed.wall_s)
    yield "optimizer steps", number(summary.num_steps)
    steps = [step["time"] for step in side.run.first.steps.values()]
    if len(steps) > 1:
        yield "seconds per step, all included", f"{(max(steps) - min(steps)) / (len(steps) - 1):.3g}"
    ran = f"{summary.num_b_run} of {summary.num_b_wanted}{share(summary.num_b_run, summary.num_b_wanted)}"
    yield "B steps run of wanted", ran
    yield from ((f"B skipped: {why}", number(count)) for why, count in summary.skips.items() if count)
    yield "dropped", number(sum(summary.drops.values()))
    yield from ((f"dropped: {why}", number(count)) for why, count in summary.drops.items())
    yield "sync rounds committed", number(summary.num_rounds_committed)
    yield "sync rounds failed", number(summary.num_rounds_failed)
    yield "evaluations", number(len(side.run.first.evaluations))
    yield "no sample lost", "proven" if side.is_balanced else "not proven: report tells why"


def _settings(sides: tuple[_Side, _Side]) -> Iterator[Part]:
    configurations = [side.run.setting() for side in sides]
    for side, found in zip(sides, configurations, strict=True):
        if not isinstance(found, Mapping):
            yield Sentence(f"The configuration of {side.name} is not recorded.", Tone.WARN)
            return
    flat = [dict(_leaves(found)) for found in configurations]
    keys = [
        key
        for key in dict.fromkeys(chain.from_iterable(flat))
        if flat[0].get(key, "–") != flat[1].get(key, "–")
    ]
    if not keys:
        yield Sentence("None.")
    if len(keys) > _MOST_SETTINGS:
        yield Sentence(f"The first {_MOST_SETTINGS} of {len(keys)}.")
    rows = tuple((key, *(_cut(each.get(key, "–")) for each in flat)) for key in keys[:_MOST_SETTINGS])
    yield Table("", ("key", *(side.name for side in sides)), rows)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(key by its path, value as JSON)."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"


def _last_losses(sides: tuple[_Side, _Side]) -> Iterator[Sentence]:
    for side in sides:
        losses = side.run.first.losses
        last = max(losses, default=None)
        told = (
            "logged no loss"
            if last is None
            else f"logged a loss of {number(losses[last])} last, at step {last}"
        )
        yield Sentence(f"{side.name} {told}.")
    trained = [side.run.setting("stage2_ab", "objective") for side in sides]
    if trained[0] != trained[1]:
        told = " and ".join(f"{each or 'an unknown one'}" for each in trained)
        yield Sentence(
            f"Their objectives differ ({told}), and so do the scales of their losses: compare the evaluations.",
            Tone.WARN,
        )


def _losses(sides: tuple[_Side, _Side]) -> Chart:
    return Chart(
        key="loss",
        title="Loss, as logged",
        description="Mean over all ranks and the steps since the last log, channels A and B alike.",
        y_title="loss",
        series=series_of(
            Mark.LINE,
            {side.name: thinned(sorted(side.run.first.losses.items())) for side in sides},
        ),
    )


def _pairs(first: _Side, second: _Side) -> Iterator[_Pair]:
    """Evaluations that fell due at the same step, on the rows that both answered."""
    others = {each.due_step: each for each in second.evaluations}
    for mine in spread([each for each in first.evaluations if each.due_step in others]):
        other = others[mine.due_step]
        rows = [
            row
            for row in sorted(mine.rows.keys() & other.rows.keys())
            if _identity(mine.rows[row]) == _identity(other.rows[row])
        ]
        if rows:
            matches = [mine.rows[row] for row in rows], [other.rows[row] for row in rows]
            scores = scores_of(matches[0]), scores_of(matches[1])
            yield _Pair(mine.due_step, matches, scores, (len(mine.rows), len(other.rows)))


def _identity(match: LoggedMatch) -> tuple[str, tuple[str, ...]]:
    """The name of a row in both runs, whose folders and image sizes may differ."""
    return Path(match.image).name, tuple(each.label for each in match.truth)


def _evaluations(sides: tuple[_Side, _Side], pairs: Sequence[_Pair]) -> Iterator[Section]:
    title = "Evaluations at equal steps"
    if not pairs:
        without = [side.name for side in sides if not side.evaluations]
        told = (
            f"{' and '.join(without)} left no evaluation whose answers were kept."
            if without
            else "No row of the validation set was answered by both runs at an equal step."
        )
        yield Section("evaluations", title, (Sentence(told, Tone.WARN),))
        return
    last = pairs[-1]
    bounds = [
        intervals(
            difference(*pair.scores),
            len(pair.matches[0]),
            min(affordable_draws(each, BAND_DRAWS) for each in pair.scores),
        )
        for pair in pairs
    ]
    points = [(pair.scores[0].points(), pair.scores[1].points()) for pair in pairs]
    yield Section("evaluations", title, filled(_curves([side.name for side in sides], pairs, points, bounds)))
    num_draws = min(affordable_draws(each, DEFAULT_DRAWS) for each in last.scores)
    whole = intervals(difference(*last.scores), len(last.matches[0]), num_draws)
    before, after = (
        {name: value for name, value in each.items() if not name.endswith(_OF_PIXELS)} for each in points[-1]
    )
    compared, classes = comparison_sections([side.name for side in sides], before, after, whole, num_draws)
    yield Section(compared.key, f"All metrics at step {last.step}", compared.parts)
    yield Section(classes.key, f"By class at step {last.step}", classes.parts)


_Points = Mapping[str, float]


def _curves(
    sides: Sequence[str],
    pairs: Sequence[_Pair],
    points: Sequence[tuple[_Points, _Points]],
    bounds: Sequence[Mapping[str, Interval]],
) -> Iterator[Part]:
    last = pairs[-1]
    num_common = len(last.matches[0])
    if last.num_rows != (num_common, num_common):
        yield Sentence(
            f"The two answered other validation rows: {last.num_rows[0]} and {last.num_rows[1]} at step {last.step}, "
            f"of which {num_common} are the same (number, file and labels); those alone are compared.",
            Tone.WARN,
        )
    yield Sentence(
        f"{sides[1]} minus {sides[0]} on the same rows, as in swift-stage2 evaluate --compare; 95 % intervals over "
        f"{BAND_DRAWS} draws of the rows, the same for both. Beyond chance where an interval leaves out 0."
    )
    known = list(zip(pairs, points, bounds, strict=True))
    for metric, name in _CURVES.items():
        yield Table(
            name,
            ("step", "rows", *sides, "difference", "95 % interval"),
            tuple(
                (
                    number(pair.step),
                    number(len(pair.matches[0])),
                    *(f"{each[metric]:.3f}" for each in both),
                    f"{both[1][metric] - both[0][metric]:+.3f}",
                    f"{bound[metric].low:+.3f} … {bound[metric].high:+.3f}",
                )
                for pair, both, bound in known
                if metric in bound
            ),
        )
    yield Chart(
        key="both",
        title="F1 of both",
        description="On the rows that both answered, at the steps at which both were evaluated.",
        y_title="0 to 1",
        series=series_of(
            Mark.LINE,
            {
                f"{name}, {side}": [
                    (pair.step, both[which][metric]) for pair, both, _ in known if metric in both[which]
                ]
                for metric, name in _CURVES.items()
                for which, side in enumerate(sides)
            },
        ),
    )
    yield Chart(
        key="gain",
        title=f"{sides[1]} minus {sides[0]}",
        description="The areas are paired 95 % intervals: both runs see the same drawn rows.",
        y_title="difference",
        series=tuple(
            banded(
                name,
                Mark.LINE,
                [
                    (pair.step, both[1][metric] - both[0][metric], bound[metric].low, bound[metric].high)
                    for pair, both, bound in known
                    if metric in bound
                ],
            )
            for metric, name in _CURVES.items()
        ),
    )


def _shown(gallery: Gallery, pairs: Sequence[_Pair]) -> Sentence:
    if not pairs:
        return Sentence("No row was answered by both runs at an equal step.")
    return Sentence(
        f"{number(len(gallery.pictures))} of the {number(gallery.num_matches)} rows whose F1 differs at step "
        f"{pairs[-1].step}, the largest difference first."
    )
