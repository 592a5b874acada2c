"""Sections on quality: detection over steps, match quality, and pictures of the newest matches.

A picture has what was seen, said, matched, missed, invented and trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.data.drawing import Drawing, gallery_image
from swift_stage2.data.recorded import RecordedRow, evaluation_file, evaluations_directory, read_recorded
from swift_stage2.data.scores import Counts, DetectionScores, detection_data
from swift_stage2.report.content import (
    Gallery,
    Part,
    Picture,
    Section,
    Sentence,
    Table,
    filled,
    number,
    pairs,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Evaluation, Match
from swift_stage2.telemetry.summary import RunSummary

_MOST_SHOWN = 30
_MEASURES = {"eval/ap50": "AP50", "eval/ap": "AP", "eval/f1": "F1"}


@dataclass(frozen=True)
class RowEvaluation:
    step: int
    """At which it began."""
    version: int
    rows: Mapping[int, RecordedRow]
    """By row of the validation set; those that were kept and have boxes."""

    @cached_property
    def scores(self) -> DetectionScores:
        """Of the rows in their order, as ``swift-stage2 evaluate`` has it: equal labels, an IoU of at least 0.5."""
        rows = [self.rows[row] for row in sorted(self.rows)]
        truths = [TrueObjects(row.truth.ref, row.truth.bbox) for row in rows if row.truth is not None]
        return DetectionScores(detection_data(truths, rows))

    @cached_property
    def matched(self) -> Mapping[int, tuple[tuple[int, int, float], ...]]:
        """By row, (prediction, true object, IoU) of each pair."""
        return dict(zip(sorted(self.rows), self.scores.matched(), strict=True))

    @cached_property
    def counts(self) -> Mapping[str, Counts]:
        """By label."""
        return self.scores.counts("class")


def evaluations_of(run: RunData) -> list[RowEvaluation]:
    """Those that ended and of which rows with boxes were kept, by step; what a resumed run asked anew counts."""
    found = []
    for _, told in sorted({each.due_step: each for each in run.first.of(Evaluation)}.items()):
        folders = map(evaluations_directory, run.run_dirs)
        files = (evaluation_file(folder, told.due_step, told.version) for folder in folders)
        rows = {row.row: row for file in files for row in read_recorded(file) if _has_boxes(row)}
        if rows:
            found.append(RowEvaluation(told.begun_step, told.version, rows))
    return found


def _has_boxes(row: RecordedRow) -> bool:
    """True if the row's truth and answer are boxes. Other tasks have none, and a damaged file may hold anything."""
    return row.truth is not None and not row.fault() and not replace(row, objects=row.truth).fault()


def detection_section(evaluations: Sequence[RowEvaluation]) -> Section:
    if not evaluations:
        return Section("detection", "Detection over steps")
    shown = evaluations[-_MOST_SHOWN:]
    points = [each.scores.points() for each in shown]
    some = (
        f"The last {len(shown)} of {len(evaluations)} evaluations. " if len(shown) < len(evaluations) else ""
    )
    told = (
        f"{some}Labels must be equal and the IoU at least 0.5, without scores, as in swift-stage2 evaluate, which also "
        "tells intervals, classes and types of errors."
    )
    rows = tuple(
        (
            number(each.step),
            number(len(each.rows)),
            *(f"{values[name]:.3f}" if name in values else "–" for name in _MEASURES),
        )
        for each, values in zip(shown, points, strict=True)
    )
    table = Table("", ("step", "rows", *_MEASURES.values()), rows)
    return Section("detection", "Detection over steps", (Sentence(told), table))


RankMatch = tuple[int, Match]
"""A rank, and one rollout against its ground truth there."""


def matches_of(ranks: Iterable[RankEvents]) -> list[RankMatch]:
    """The matches of all ranks by time.

    A draw that a resumed process repeated counts once, as it was answered last. Evaluations repeat their keys, so a key
    counts once for every version.
    """
    every = [(rank.rank, match) for rank in ranks for match in rank.of(Match)]
    found = {(rank, match.purpose, match.sample, match.version): (rank, match) for rank, match in every}
    return sorted(found.values(), key=lambda each: each[1].time)


_MOST_PICTURES = 24
_MOST_CHARACTERS = 20_000  # of a text that is shown


def gallery_of(matches: Sequence[RankMatch], similarity: str, size: int = _MOST_PICTURES) -> Gallery:
    """The newest ``size`` of the ``matches``, which are by time. Opens their images."""
    newest = matches[: -size - 1 : -1]
    told = f"{number(len(newest))} of {number(len(matches))} matches, the newest first."
    return Gallery(told, tuple(_picture(*each, similarity) for each in newest))


def _picture(rank: int, match: Match, similarity: str) -> Picture:
    drawing = Drawing(match.truth, match.predicted, match.pairs)
    path = (match.images[0] if match.images else None) or ""
    image, trouble = gallery_image(drawing, path, match.space, similarity)
    return Picture(
        image=image,
        trouble=trouble,
        name=Path(path).name or "an image without a path",
        facts=tuple(_facts(rank, match)),
        fate="evaluation, never trained" if match.purpose == "evaluation" else "training",
        texts=(("Rollout", _shortened(match.rollout)), ("Corrected answer", _shortened(match.target))),
    )


def _shortened(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]} … and {more} characters more" if more > 0 else text


def _facts(rank: int, match: Match) -> Iterator[str]:
    epoch, position, row, attempt = match.sample
    again = f", attempt {attempt}" if attempt else ""
    yield (
        f"row {row} of the validation set, rank {rank}"
        if match.purpose == "evaluation"
        else f"row {row}, epoch {epoch}, position {position}, rank {rank}{again}"
    )
    num_pairs = len(match.pairs)
    yield (
        f"weights of version {match.version}; {num_pairs} matched, {len(match.truth) - num_pairs} missed, "
        f"{len(match.predicted) - num_pairs} false"
    )
    yield from (f"dropped: {count} × {reason}" for reason, count in match.dropped.items() if count)
    if match.reward:
        yield "reward: " + ", ".join(f"{term} {value:.2f}" for term, value in match.reward.items())
    if match.truncated:
        yield "cut off at max_new_tokens"
    if len(match.images) > 1:
        yield f"first of {len(match.images)} images"


_AS_TRAINING_DOES = (
    "Objects are matched as training matches them, by matching.iou_threshold (0.3 unless set) and whatever their "
    "labels unless matching.same_label is set: a corrected target has the true ones. swift-stage2 evaluate is stricter."
)
_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1"}
_NOT_SHOWN = ("truncated_ratio",)


def quality_section(run: RunData, summary: RunSummary) -> Section:
    names = _NAMES | {"mean_iou": f"mean {run.similarity}"}
    evaluations = run.first.of(Evaluation)
    told = dict.fromkeys(name for each in evaluations for name in each.ratios if name not in _NOT_SHOWN)
    own = {name: name for name in told if name not in names}  # of the task, which may be no shares
    parts: list[Part | None] = [
        pairs("Quality over the run", {tag: f"{value:.3f}" for tag, value in summary.ratios.items()}),
        _evaluations(evaluations, {**names, **own}),
    ]
    shown = filled(parts)
    return Section("quality", "Match quality", (Sentence(_AS_TRAINING_DOES), *shown) if shown else ())


def _evaluations(evaluations: Sequence[Evaluation], measures: Mapping[str, str]) -> Table:
    rows = tuple(
        (
            number(each.begun_step),
            number(each.version),
            f"{each.counts.num_answered} of {each.counts.num_wanted}",
            *(number(each.ratios.get(measure)) for measure in measures),
            each.end,
        )
        for each in evaluations[-_MOST_SHOWN:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    return Table(title, ("step", "version", "answered", *measures.values(), "end"), rows)
