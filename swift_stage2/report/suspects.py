"""Labels of the validation set that are probably wrong: what no version finds, and what all of the last ones add. Pure.

A true object is suspect if none of at least ``FEWEST`` versions predicted a box of its label there. A false box is
suspect if the last ``FEWEST`` versions all predicted it, of one label, where nothing true is near. How much that says
depends on the model: ``strength`` is the share of its label's objects that the versions find, or of its label's
boxes that are right, so that suspects of a label that the model knows come first, and one that it never met is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations
from statistics import fmean

from swift_stage2.channel_b.matching import iou_matrix
from swift_stage2.data.prediction import TRUNCATED, LabelledBoxes
from swift_stage2.data.recorded import RecordedRow
from swift_stage2.records import Box
from swift_stage2.report.content import Section, Sentence, Table, number
from swift_stage2.report.quality import RowEvaluation

FEWEST = 3
"""Versions that must agree."""
_MOST_SHOWN = 20
_SAME = 0.5  # IoU of one box in two versions
_NEAR = 0.1  # IoU from which a true object is near, as TIDE has it


class SuspectKind(StrEnum):
    NEVER_FOUND = "truth never found"
    ALWAYS_ADDED = "false in all versions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One label of the data, or one that it lacks."""

    kind: SuspectKind
    row: int
    image: str
    label: str
    box: Box
    """In pixels."""
    strength: float
    """0 to 1."""
    versions: tuple[int, ...]
    """That agree."""
    predicted_instead: str | None = None
    """The label that all of the last versions give to a true object that they never find."""


@dataclass(frozen=True, slots=True)
class _Version:
    """The answers of one version to the rows that it was asked, and how well it knows each label."""

    version: int
    rows: Mapping[int, RecordedRow]
    found: Mapping[int, frozenset[int]]
    """By row, the numbers of the true objects that were matched."""
    right: Mapping[int, frozenset[int]]
    """By row, the numbers of the predictions that were matched."""
    recall: Mapping[str, float]
    precision: Mapping[str, float]

    def false(self, row: int) -> Iterator[tuple[str, Box]]:
        objects = self.rows[row].objects
        for index, found in enumerate(zip(objects.ref, objects.bbox, strict=True)):
            if index not in self.right[row]:
                yield found


def suspects_of(evaluations: Sequence[RowEvaluation]) -> list[Suspect] | None:
    """The strongest first; None with fewer than ``FEWEST`` versions."""
    versions = [_version(each) for each in {each.version: each for each in evaluations}.values()]
    if len(versions) < FEWEST:
        return None
    found: list[Suspect] = []
    for row in sorted({row for each in versions for row in each.rows}):
        asked = [each for each in versions if row in each.rows and _is_answered(each.rows[row])]
        # Rows that changed between parts of a run are not those of one label.
        asked = [each for each in asked if each.rows[row].truth == asked[-1].rows[row].truth]
        if len(asked) >= FEWEST:
            found += [*_never_found(row, asked), *_always_added(row, asked[-FEWEST:])]
    return sorted((each for each in found if each.strength), key=lambda each: (-each.strength, each.row))


def suspect_lines(suspects: Sequence[Suspect]) -> str:
    return "".join(json.dumps(asdict(each)) + "\n" for each in suspects)


def _is_answered(row: RecordedRow) -> bool:
    """An answer that was cut off says nothing of what it lacks."""
    return bool(row.answer) and row.finish_reason != TRUNCATED


def _version(evaluation: RowEvaluation) -> _Version:
    rows, counts = sorted(evaluation.rows), evaluation.scores.counts("class")
    matched = dict(zip(rows, evaluation.scores.matched(), strict=True))
    return _Version(
        evaluation.version,
        evaluation.rows,
        {row: frozenset(true for _, true, _ in pairs) for row, pairs in matched.items()},
        {row: frozenset(prediction for prediction, _, _ in pairs) for row, pairs in matched.items()},
        {label: each.matched / each.true for label, each in counts.items() if each.true},
        {label: each.matched / each.predicted for label, each in counts.items() if each.predicted},
    )


def _iou(one: Box, other: Box) -> float:
    return float(iou_matrix([one], [other])[0, 0])


def _never_found(row: int, versions: Sequence[_Version]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    truth = newest.truth or LabelledBoxes()
    found = frozenset.union(*(each.found[row] for each in versions))
    for index, (label, box) in enumerate(zip(truth.ref, truth.bbox, strict=True)):
        if index in found:
            continue
        answers = [version.rows[row].objects for version in versions[-FEWEST:]]
        said = [
            {name for name, place in zip(each.ref, each.bbox, strict=True) if _iou(place, box) >= _SAME}
            for each in answers
        ]
        yield Suspect(
            kind=SuspectKind.NEVER_FOUND,
            row=row,
            image=newest.file or newest.image,
            label=label,
            box=box,
            strength=round(fmean(version.recall[label] for version in versions), 4),
            versions=tuple(version.version for version in versions),
            predicted_instead=min(set.intersection(*said), default=None),
        )


def _always_added(row: int, versions: Sequence[_Version]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    truth = newest.truth or LabelledBoxes()
    for label, box in versions[-1].false(row):
        if any(_iou(box, true) >= _NEAR for true in truth.bbox):
            continue
        seen = [box]
        for version in versions[:-1]:
            alike = [place for name, place in version.false(row) if name == label]
            seen += sorted(alike, key=lambda other: _iou(other, box))[-1:]
        least = min(_iou(a, b) for a, b in combinations(seen, 2)) if len(seen) == len(versions) else 0.0
        if least >= _SAME:
            yield Suspect(
                kind=SuspectKind.ALWAYS_ADDED,
                row=row,
                image=newest.file or newest.image,
                label=label,
                box=box,
                strength=round(least * fmean(version.precision[label] for version in versions), 4),
                versions=tuple(version.version for version in versions),
            )


def suspects_section(suspects: Sequence[Suspect] | None) -> Section:
    """The strongest ones; the file beside the page has all."""
    title = "Suspected label errors"
    if not suspects:
        return Section("suspects", title)
    told = (
        f"True objects that none of at least {FEWEST} versions found, and boxes without a true object near that the "
        f"last {FEWEST} versions all predicted. Look from the first on: strength is the share of the label's objects "
        "that the versions find, or of its boxes that are right. What a model never learned it misses, too."
    )
    rows = tuple(
        (
            str(each.row),
            each.label,
            each.kind + (f", they say {each.predicted_instead!r}" if each.predicted_instead else ""),
            ", ".join(f"{value:g}" for value in each.box),
            f"{each.strength:.2f}",
            each.image,
        )
        for each in suspects[:_MOST_SHOWN]
    )
    table = Table(
        f"The strongest {number(len(rows))} of {number(len(suspects))}",
        ("row", "label", "suspect", "box", "strength", "image"),
        rows,
        ends_in_words=True,
    )
    return Section("suspects", title, (Sentence(told), table))
