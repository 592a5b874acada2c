"""The evaluations of a run with what every row was answered, and what they tell of detection over steps. Pure.

``evaluations_of`` is the only place that knows where rows come from: the files in RUN_DIR/evaluations, and where there
are none the matches that a run keeps of its first validation rows. Their boxes are in the space in which they were
matched, those of the files in pixels; what is told here does not change with the scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.detections.objects import ScoreConvention, detection_data
from swift_stage2.detections.prediction import TRUNCATED, LabelledBoxes, Prediction
from swift_stage2.detections.recorded import RecordedRow, read_evaluations
from swift_stage2.detections.scores import ERRORS, DetectionScores
from swift_stage2.evaluate.intervals import Interval, affordable_draws, intervals
from swift_stage2.pages.content import (
    Chart,
    Mark,
    Part,
    Section,
    Sentence,
    Table,
    banded,
    filled,
    number,
    series_of,
)
from swift_stage2.report.matches import EVALUATION, Box, Labelled, LoggedMatch, match_of
from swift_stage2.report.run_data import RunData

BAND_DRAWS = 200
"""Of one evaluation's interval."""
MOST_SHOWN = 30
_MEASURES = {"eval/ap50": "AP50", "eval/ap": "AP", "eval/f1": "F1"}
_MOST_CLASSES = 20


@dataclass(frozen=True)
class RowEvaluation:
    due_step: int
    begun_step: int
    version: int
    rows: Mapping[int, LoggedMatch]
    """By row of the validation set; those that were answered and kept."""

    @cached_property
    def scores(self) -> DetectionScores:
        """Labels must be equal and the IoU at least 0.5, as ``swift-stage2 evaluate`` has it."""
        return scores_of([self.rows[row] for row in sorted(self.rows)])


def evaluations_of(run: RunData, matches: Iterable[LoggedMatch]) -> list[RowEvaluation]:
    """Those that ended and of which rows were kept, by step.

    Raises:
        UserError: an audit cannot be read.
    """
    recorded = [
        RowEvaluation(
            each.due_step,
            each.step,
            each.version,
            {row.row: match for row in each.rows if (match := _match(row, each.version)) is not None},
        )
        for each in read_evaluations(run.run_dirs)
    ]
    return [each for each in recorded if each.rows] or _of_matches(run, matches)


def _match(row: RecordedRow, version: int) -> LoggedMatch | None:
    """The row in the form of a match, without pairs; None of a task without boxes, or if its boxes are none."""
    if row.truth is None:
        return None
    try:
        return match_of(
            {
                "time": 0.0,
                "rank": 0,
                "sample": (0, 0, row.row, 0),
                "purpose": EVALUATION,
                "version": version,
                "images": (row.file,),
                "space": (row.width, row.height),
                "truth": [*map(Labelled, row.truth.ref, row.truth.bbox)],
                "predicted": [*map(Labelled, row.objects.ref, row.objects.bbox)],
                "pairs": (),
                "rollout": row.answer,
                "target": "",
                "truncated": row.finish_reason == TRUNCATED,
                "dropped": {},
            }
        )
    except (ValueError, OverflowError):
        return None


def _of_matches(run: RunData, matches: Iterable[LoggedMatch]) -> list[RowEvaluation]:
    """Of a run of an earlier release, or without files: the first validation rows alone."""
    by_version: defaultdict[int, dict[int, LoggedMatch]] = defaultdict(dict)
    for match in matches:
        if match.purpose == EVALUATION and not match.is_of_points:
            by_version[match.version][match.row] = match
    found = {
        record["begun_step"]: RowEvaluation(
            record["begun_step"] if record.get("due_step") is None else record["due_step"],
            record["begun_step"],
            record["version"],
            by_version[record["version"]],
        )
        for record in run.first.evaluations
        if record["version"] in by_version
    }
    return [found[step] for step in sorted(found)]


def scores_of(matches: Sequence[LoggedMatch]) -> DetectionScores:
    """The metrics of these answers, one per row, in this order."""
    truths = [
        TrueObjects(tuple(each.label for each in match.truth), tuple(boxes_of(match.truth)))
        for match in matches
    ]
    answers = [
        Prediction(
            image=match.image,
            width=match.space[0],
            height=match.space[1],
            objects=LabelledBoxes(
                tuple(each.label for each in match.predicted), tuple(boxes_of(match.predicted))
            ),
        )
        for match in matches
    ]
    return DetectionScores(detection_data(truths, answers, ScoreConvention.ONE))


def boxes_of(objects: Iterable[Labelled]) -> Iterator[Box]:
    """Their boxes; evaluations of points never reach this module."""
    for each in objects:
        yield cast(Box, each.box)


def image_f1(scores: DetectionScores) -> NDArray[np.float64]:
    """F1 of every image, 1 where there is nothing and nothing was predicted."""
    data = scores.data
    objects = np.bincount([*data.truth.images, *data.predicted.images], minlength=data.num_images)
    matched = np.bincount(scores.overlaps.images[scores.pairs[0]], minlength=data.num_images)
    values = np.ones(data.num_images)
    np.divide(2.0 * matched, objects, out=values, where=objects > 0)
    return values


def spread(evaluations: Sequence[RowEvaluation]) -> list[RowEvaluation]:
    """At most ``MOST_SHOWN``, evenly, with the first and the last."""
    last = len(evaluations) - 1
    places = {round(place * last / (MOST_SHOWN - 1)) for place in range(MOST_SHOWN)}
    return list(evaluations) if last < MOST_SHOWN else [evaluations[place] for place in sorted(places)]


def detection_section(evaluations: Sequence[RowEvaluation]) -> Section:
    """AP, F1 and error types over steps; where the last evaluation fails."""
    return Section(
        "detection",
        "Detection on validation rows",
        filled(_parts(spread(evaluations), len(evaluations)))
        if evaluations
        else (Sentence("No evaluation left answers to validation rows."),),
    )


def _parts(shown: Sequence[RowEvaluation], num_all: int) -> Iterator[Part]:
    last = shown[-1]
    bounds = [
        intervals(each.scores.values, each.scores.data.num_images, affordable_draws(each.scores, BAND_DRAWS))
        for each in shown
    ]
    points = [each.scores.points() for each in shown]
    errors = [each.scores.errors() for each in shown]
    some = f"{len(shown)} of {num_all} evaluations, evenly chosen. " if num_all > len(shown) else ""
    yield Sentence(
        f"{some}From the {number(len(last.rows))} rows whose answers were kept: labels must be equal and the IoU at "
        f"least 0.5, without scores, as in swift-stage2 evaluate. 95 % intervals over {BAND_DRAWS} draws of the rows."
    )
    yield Table(
        "",
        ("step", "rows", *(cell for name in _MEASURES.values() for cell in (name, "95 %"))),
        tuple(
            (
                number(each.begun_step),
                number(len(each.rows)),
                *(cell for name in _MEASURES for cell in _cells(points[place], bounds[place], name)),
            )
            for place, each in enumerate(shown)
        ),
    )
    yield Chart(
        key="detection",
        title="AP50, AP and F1 over steps",
        description="Greedy answers to the validation rows, at the step at which each evaluation began. F1's area is a "
        "95 % interval over the rows.",
        y_title="0 to 1",
        series=tuple(
            banded(name, Mark.LINE, list(_known(shown, points, bounds, metric)))
            for metric, name in _MEASURES.items()
        ),
    )
    yield Chart(
        key="error_types",
        title="Error types over steps, errors per 100 rows",
        description="TIDE's types at an IoU of 0.5. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in ERRORS.items())
        + ".",
        y_title="errors per 100 rows",
        series=series_of(
            Mark.LINE,
            {
                name: [
                    (each.begun_step, 100 * found[name]["count"] / len(each.rows))
                    for each, found in zip(shown, errors, strict=True)
                ]
                for name in ERRORS
            },
        ),
    )
    yield from _failures(last, points[-1])


def _known(
    shown: Sequence[RowEvaluation],
    points: Sequence[Mapping[str, float]],
    bounds: Sequence[Mapping[str, Interval]],
    metric: str,
) -> Iterator[tuple[float, float, float, float]]:
    for each, values, bound in zip(shown, points, bounds, strict=True):
        if metric in values:  # AP has no interval
            found = bound.get(metric, Interval(values[metric], values[metric]))
            yield each.begun_step, values[metric], found.low, found.high


def _cells(points: Mapping[str, float], bounds: Mapping[str, Interval], name: str) -> tuple[str, str]:
    value = f"{points[name]:.3f}" if name in points else "–"
    return value, f"{bounds[name].low:.2f} … {bounds[name].high:.2f}" if name in bounds else "–"


def _failures(last: RowEvaluation, points: Mapping[str, float]) -> Iterator[Table]:
    """Classes, and numbers of objects in a row, with the most objects missed or invented first."""
    for kind, named in (("class", "Classes"), ("objects", "Numbers of true objects in a row")):
        wrong = {
            part: (counts.true + counts.predicted - 2 * counts.matched, counts)
            for part, counts in last.scores.counts(kind).items()
        }
        rows = []
        for part in sorted(wrong, key=lambda part: -wrong[part][0])[:_MOST_CLASSES]:
            num_wrong, (predicted, true, found) = wrong[part]
            f1 = points.get(f"{kind}/{part}/f1")
            if num_wrong:
                told = map(number, (true, found, true - found, predicted - found))
                rows.append((part, *told, "–" if f1 is None else f"{f1:.3f}"))
        title = f"{named} that fail most, at step {last.begun_step}"
        yield Table(title, (kind, "true", "found", "missed", "false", "F1"), tuple(rows))
