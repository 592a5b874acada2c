"""Labels of the validation set that are probably wrong: what no version finds, and what all of the last ones add. Pure.

A true object is suspect if none of at least ``FEWEST`` versions predicted a box of its label there. A false box is
suspect if the last ``FEWEST`` versions all predicted it, of one label, where nothing true is near. How much that says
depends on the model: ``strength`` is the share of its label's objects that the versions find, or of its label's
boxes that are right, so that suspects of a label that the model knows come first, and one that it never met is none.

hotcoco's search (``image_diagnostics``) looks at one set of predictions and needs their scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import cast

from swift_stage2.pages.content import Section, Sentence, Table, filled, number
from swift_stage2.pages.pictures import DrawnBox, Gallery, Picture, Thumbnails
from swift_stage2.report.drift import iou
from swift_stage2.report.evaluations import RowEvaluation, boxes_of
from swift_stage2.report.matches import Box, Labelled, LoggedMatch

SUSPECTS_KEY = "suspects"
FEWEST = 3
"""Versions that must agree."""
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
    """In ``space``."""
    space: tuple[int, int]
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
    rows: Mapping[int, LoggedMatch]
    false: Mapping[int, Sequence[Labelled]]
    missed: Mapping[int, frozenset[int]]
    recall: Mapping[str, float]
    precision: Mapping[str, float]


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


def _is_answered(match: LoggedMatch) -> bool:
    """An answer that was cut off says nothing of what it lacks."""
    return bool(match.rollout) and not match.truncated


def suspect_lines(suspects: Sequence[Suspect]) -> str:
    return "".join(json.dumps(asdict(each)) + "\n" for each in suspects)


def _version(evaluation: RowEvaluation) -> _Version:
    rows, counts = sorted(evaluation.rows), evaluation.scores.counts("class")
    missed, false = (dict(zip(rows, of_images, strict=True)) for of_images in evaluation.scores.unmatched())
    return _Version(
        evaluation.version,
        evaluation.rows,
        {row: [evaluation.rows[row].predicted[index] for index in false[row]] for row in rows},
        {row: frozenset(missed[row]) for row in rows},
        {label: each.matched / each.true for label, each in counts.items() if each.true},
        {label: each.matched / each.predicted for label, each in counts.items() if each.predicted},
    )


def _never_found(row: int, versions: Sequence[_Version]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    missed = frozenset.intersection(*(each.missed.get(row, frozenset()) for each in versions))
    for index in sorted(missed):
        label, box = newest.truth[index].label, cast(Box, newest.truth[index].box)
        said = [
            {each.label for each in version.rows[row].predicted if iou(cast(Box, each.box), box) >= _SAME}
            for version in versions[-FEWEST:]
        ]
        yield Suspect(
            kind=SuspectKind.NEVER_FOUND,
            row=row,
            image=newest.image,
            label=label,
            box=box,
            space=newest.space,
            strength=round(fmean(version.recall[label] for version in versions), 4),
            versions=tuple(version.version for version in versions),
            predicted_instead=min(set.intersection(*said), default=None),
        )


def _always_added(row: int, versions: Sequence[_Version]) -> Iterator[Suspect]:
    newest = versions[-1].rows[row]
    for one in versions[-1].false.get(row, ()):
        box = cast(Box, one.box)
        if any(iou(box, true) >= _NEAR for true in boxes_of(newest.truth)):
            continue
        seen = [box]
        for version in versions[:-1]:
            alike = list(boxes_of(each for each in version.false.get(row, ()) if each.label == one.label))
            if alike:
                seen.append(max(alike, key=lambda other, box=box: iou(other, box)))  # type: ignore[misc]
        least = min(iou(a, b) for a, b in combinations(seen, 2)) if len(seen) == len(versions) else 0.0
        if least >= _SAME:
            yield Suspect(
                kind=SuspectKind.ALWAYS_ADDED,
                row=row,
                image=newest.image,
                label=one.label,
                box=box,
                space=newest.space,
                strength=round(least * fmean(version.precision[one.label] for version in versions), 4),
                versions=tuple(version.version for version in versions),
            )


def suspects_section(suspects: Sequence[Suspect] | None, gallery: Gallery) -> Section:
    """How many there are; the page adds the pictures."""
    title = "Suspected label errors"
    if suspects is None:
        told = f"Fewer than {FEWEST} versions were evaluated, so no label of the validation rows can be suspected."
        return Section(SUSPECTS_KEY, title, (Sentence(told),))
    if not suspects:
        return Section(SUSPECTS_KEY, title, (Sentence("No label of the validation rows is suspect."),))
    rows = tuple(
        (str(kind), number(len(own)), number(max(each.strength for each in own)))
        for kind in SuspectKind
        if (own := [each for each in suspects if each.kind is kind])
    )
    told = (
        f"True objects that none of at least {FEWEST} versions found, and boxes without a true object near that the "
        f"last {FEWEST} versions all predicted. Look from the first on: strength is the share of the label's objects "
        "that the versions find, or of its boxes that are right. What a model never learned it misses, too."
    )
    shown = f"{number(len(gallery.pictures))} of {number(gallery.num_matches)} rows are shown, the strongest first."
    table = Table("", ("suspect", "number", "highest strength"), rows)
    return Section(SUSPECTS_KEY, title, filled((Sentence(told), table, Sentence(shown))))


def suspects_gallery(suspects: Sequence[Suspect], evaluations: Sequence[RowEvaluation], size: int) -> Gallery:
    """A picture for every row that has suspects, the strongest first. Opens at most ``size`` images."""
    by_row: dict[int, list[Suspect]] = {}
    for each in suspects:
        by_row.setdefault(each.row, []).append(each)
    newest = {row: match for evaluation in evaluations for row, match in evaluation.rows.items()}
    thumbnails = Thumbnails()
    pictures = [_picture(newest[row], own, thumbnails) for row, own in list(by_row.items())[:size]]
    return Gallery(
        pictures=tuple(pictures),
        thumbnails=thumbnails.uris,
        num_matches=len(by_row),
        backward="Stronger",
        forward="Weaker",
        texts=("Newest answer", "Suspects"),
        filters=tuple(map(str, SuspectKind)),
        legend=(
            ("missed", "ground truth that no version found"),
            ("false", f"predicted by the last {FEWEST} versions, nothing true near"),
            ("truth", "other ground truth"),
            ("matched", "other prediction of the newest version"),
        ),
    )


def _picture(match: LoggedMatch, suspects: Sequence[Suspect], thumbnails: Thumbnails) -> Picture:
    path = match.image
    image, trouble = thumbnails.add(path or None)
    marked = {(each.kind, each.label, each.box) for each in suspects}

    def drawn(objects: Sequence[Labelled], kind: SuspectKind, suspect: str, other: str) -> Iterator[DrawnBox]:
        for each in objects:
            yield (suspect if (kind, each.label, each.box) in marked else other, *each.box, each.label)

    return Picture(
        image=image,
        trouble=trouble,
        name=Path(path).name or "an image without a path",
        facts=(
            f"row {match.row} of the validation set",
            path or "no path",
            ", ".join(f"{each.label}: {each.kind}" for each in suspects),
        ),
        fate=f"strength {max(each.strength for each in suspects):.2f}",
        space=match.space,
        boxes=(
            *drawn(match.truth, SuspectKind.NEVER_FOUND, "missed", "truth"),
            *drawn(match.predicted, SuspectKind.ALWAYS_ADDED, "false", "matched"),
        ),
        outcomes=tuple({str(each.kind): None for each in suspects}),
        rollout=match.rollout,
        target="\n".join(map(_told, suspects)),
    )


def _told(suspect: Suspect) -> str:
    instead = f", they say {suspect.predicted_instead!r}" if suspect.predicted_instead else ""
    box = ", ".join(f"{value:g}" for value in suspect.box)
    versions = f"{len(suspect.versions)} versions"
    return f"{suspect.label} ({box}): {suspect.kind}, {versions}, strength {suspect.strength:.2f}{instead}"
