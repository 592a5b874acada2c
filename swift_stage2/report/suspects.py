"""Labels of the validation set that are probably wrong: what no version finds, and what all of the last ones add. Pure.

A true object is suspect if none of at least ``FEWEST`` versions predicted a box of its label there. A false box is
suspect if the last ``FEWEST`` versions all predicted it, of one label, where nothing true is near. How much that says
depends on the model: ``strength`` is the share of its label's objects that the versions find, or of its label's
boxes that are right, so that suspects of a label that the model knows come first, and one that it never met is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Suspect:
    """One label of the data, or one that it lacks."""

    row: int
    image: str
    label: str
    box: Box
    """In pixels."""
    what: str
    strength: float
    """0 to 1."""


def suspects_of(evaluations: Sequence[RowEvaluation]) -> list[Suspect]:
    """The strongest first; none with fewer than ``FEWEST`` versions."""
    versions = [*{each.version: each for each in evaluations}.values()]
    found: list[Suspect] = []
    for row in sorted({row for each in versions for row in each.rows}):
        asked = [each for each in versions if row in each.rows and _is_answered(each.rows[row])]
        # Rows that changed between parts of a run are not those of one label.
        asked = [each for each in asked if each.rows[row].truth == asked[-1].rows[row].truth]
        if len(asked) >= FEWEST:
            found += [*_never_found(row, asked), *_always_added(row, asked[-FEWEST:])]
    return sorted((each for each in found if each.strength), key=lambda each: (-each.strength, each.row))


def _is_answered(row: RecordedRow) -> bool:
    """An answer that was cut off says nothing of what it lacks."""
    return bool(row.answer) and row.finish_reason != TRUNCATED


def _iou(one: Box, other: Box) -> float:
    return float(iou_matrix([one], [other])[0, 0])


def _never_found(row: int, versions: Sequence[RowEvaluation]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    truth = newest.truth or LabelledBoxes()
    found = {true for each in versions for _, true, _ in each.matched[row]}
    for index, (label, box) in enumerate(zip(truth.ref, truth.bbox, strict=True)):
        if index in found:
            continue
        answers = [version.rows[row].objects for version in versions[-FEWEST:]]
        said = set.intersection(
            *(
                {name for name, place in zip(each.ref, each.bbox, strict=True) if _iou(place, box) >= _SAME}
                for each in answers
            )
        )
        what = "truth never found" + (f", they say {min(said)!r}" if said else "")
        counts = [version.counts[label] for version in versions]
        strength = fmean(each.matched / each.true for each in counts)
        yield Suspect(row, newest.file or newest.image, label, box, what, strength)


def _always_added(row: int, versions: Sequence[RowEvaluation]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    truth = newest.truth or LabelledBoxes()
    for label, box in _false(versions[-1], row):
        if any(_iou(box, true) >= _NEAR for true in truth.bbox):
            continue
        seen = [box]
        for version in versions[:-1]:
            alike = [place for name, place in _false(version, row) if name == label]
            seen += sorted(alike, key=lambda other: _iou(other, box))[-1:]
        least = min(_iou(a, b) for a, b in combinations(seen, 2)) if len(seen) == len(versions) else 0.0
        if least >= _SAME:
            counts = [version.counts[label] for version in versions]
            strength = least * fmean(each.matched / each.predicted for each in counts)
            yield Suspect(row, newest.file or newest.image, label, box, "false in all versions", strength)


def _false(version: RowEvaluation, row: int) -> Iterator[tuple[str, Box]]:
    objects, right = version.rows[row].objects, {prediction for prediction, _, _ in version.matched[row]}
    for index, found in enumerate(zip(objects.ref, objects.bbox, strict=True)):
        if index not in right:
            yield found


def suspects_section(suspects: Sequence[Suspect]) -> Section:
    """The strongest ones."""
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
            each.what,
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
