"""How good rollouts and evaluations were, and detection over steps: answers to the validation rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.detections.recorded import RecordedRow, read_evaluations
from swift_stage2.detections.scores import DetectionScores, detection_data
from swift_stage2.pages.content import (
    Part,
    Section,
    Sentence,
    Table,
    filled,
    number,
    pairs,
)
from swift_stage2.report.gallery import RankMatch
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.events import Evaluation
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


def evaluations_of(run: RunData) -> list[RowEvaluation]:
    """Those that ended and of which rows with boxes were kept, by step.

    Raises:
        UserError: a log cannot be read.
    """
    found = (
        RowEvaluation(each.step, each.version, {row.row: row for row in each.rows if _has_boxes(row)})
        for each in read_evaluations(run.run_dirs)
    )
    return [each for each in found if each.rows]


def _has_boxes(row: RecordedRow) -> bool:
    """True if the row's truth and answer are boxes. Other tasks have none, and a damaged file may hold anything."""
    return row.truth is not None and not row.fault() and not replace(row, objects=row.truth).fault()


def detection_section(evaluations: Sequence[RowEvaluation]) -> Section:
    title = "Detection over steps"
    if not evaluations:
        return Section("detection", title, (Sentence("No evaluation left answers to validation rows."),))
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
    return Section("detection", title, (Sentence(told), table))


_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1", "mean_iou": "mean IoU"}
_NOT_SHOWN = ("truncated_ratio",)
_MOST_EVALUATIONS = 12


def quality_section(run: RunData, summary: RunSummary, matches: Sequence[RankMatch]) -> Section:
    names = _NAMES
    if any(match.is_of_points for match in matches):
        names = _NAMES | {"mean_iou": "mean closeness"}
    evaluations = run.first.of(Evaluation)
    told = dict.fromkeys(name for each in evaluations for name in each.ratios if name not in _NOT_SHOWN)
    own = {name: name for name in told if name not in _NAMES}  # of the task, which may be no shares
    parts: list[Part | None] = [
        quality_table(summary),
        _evaluations(evaluations, {**names, **own}),
    ]
    return Section("quality", "Match quality", filled(parts) or (Sentence("No rollout was matched."),))


def quality_table(summary: RunSummary) -> Table:
    return pairs("Quality over the run", {tag: f"{value:.3f}" for tag, value in summary.ratios.items()})


def _evaluations(evaluations: Sequence[Evaluation], measures: Mapping[str, str]) -> Table:
    rows = tuple(
        (
            number(each.begun_step),
            number(each.version),
            f"{each.counts.num_answered} of {each.counts.num_wanted}",
            *(number(each.ratios.get(measure)) for measure in measures),
            each.end,
        )
        for each in evaluations[-_MOST_EVALUATIONS:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    return Table(title, ("step", "version", "answered", *measures.values(), "end"), rows)
