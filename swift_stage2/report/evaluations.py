"""Detection over steps: what the validation rows were answered at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.detections.objects import ScoreConvention, detection_data
from swift_stage2.detections.recorded import RecordedRow, read_evaluations
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.pages.content import Chart, Mark, Section, Sentence, Table, number, series_of
from swift_stage2.report.run_data import RunData

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
        return DetectionScores(detection_data(truths, rows, ScoreConvention.ONE))


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
    last, shown = len(evaluations) - 1, evaluations
    if last >= _MOST_SHOWN:
        places = {round(place * last / (_MOST_SHOWN - 1)) for place in range(_MOST_SHOWN)}
        shown = [evaluations[place] for place in sorted(places)]
    points = [each.scores.points() for each in shown]
    some = f"{len(shown)} of {len(evaluations)} evaluations. " if len(shown) < len(evaluations) else ""
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
    chart = Chart(
        key="detection",
        title="AP50, AP and F1 over steps",
        description="Greedy answers to the validation rows, at the step at which each evaluation began.",
        y_title="0 to 1",
        series=series_of(
            Mark.LINE,
            {
                name: [
                    (each.step, values[metric])
                    for each, values in zip(shown, points, strict=True)
                    if metric in values
                ]
                for metric, name in _MEASURES.items()
            },
        ),
    )
    table = Table("", ("step", "rows", *_MEASURES.values()), rows)
    return Section("detection", title, (Sentence(told), table, chart))
