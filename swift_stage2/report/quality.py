"""Adds up how good rollouts were, by the version that gave them. Pure.

From the ledger's ``matched`` records, which tell of every rollout that became a segment; from the matches where
there is no ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from swift_stage2.report import quality
from swift_stage2.report.content import (
    MOST_POINTS,
    Chart,
    Mark,
    Part,
    Section,
    Sentence,
    Table,
    filled,
    number,
    series_of,
)
from swift_stage2.report.matches import EVALUATION, Match
from swift_stage2.report.run_data import RunData
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry


@dataclass(slots=True, kw_only=True)
class Quality:
    """Counts over rollouts. A quotient is None where its denominator is zero."""

    num_rollouts: int = 0
    num_predictions: int = 0
    num_truth: int = 0
    num_pairs: int = 0
    sum_iou: float = 0.0

    @property
    def precision(self) -> float | None:
        """Matched share of predictions."""
        return self.num_pairs / self.num_predictions if self.num_predictions else None

    @property
    def recall(self) -> float | None:
        """Matched share of ground truth."""
        return self.num_pairs / self.num_truth if self.num_truth else None

    @property
    def f1(self) -> float | None:
        """Their harmonic mean."""
        total = self.num_predictions + self.num_truth
        return 2 * self.num_pairs / total if total else None

    @property
    def mean_iou(self) -> float | None:
        """Of matched pairs."""
        return self.sum_iou / self.num_pairs if self.num_pairs else None

    def add(self, predictions: int, truth: int, pairs: int, sum_iou: float) -> None:
        """One rollout."""
        self.num_rollouts += 1
        self.num_predictions += predictions
        self.num_truth += truth
        self.num_pairs += pairs
        self.sum_iou += sum_iou


def of_ledger(records: Iterable[Record]) -> dict[int, Quality]:
    """By version, in order."""
    found: dict[int, Quality] = {}
    for record in records:
        if record["kind"] == Entry.MATCHED:
            told = record["quality"]
            found.setdefault(record["version"], Quality()).add(
                told["num_predictions"], told["num_ground_truth"], told["num_pairs"], told["sum_iou"]
            )
    return dict(sorted(found.items()))


def of_matches(matches: Iterable[Match]) -> dict[int, Quality]:
    """By version, in order."""
    found: dict[int, Quality] = {}
    for match in matches:
        found.setdefault(match.version, Quality()).add(
            len(match.predicted),
            len(match.truth),
            len(match.pairs),
            sum(iou for _, _, iou in match.pairs),
        )
    return dict(sorted(found.items()))


_MEASURES = ("precision", "recall", "f1", "mean_iou")
_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1", "mean_iou": "mean IoU"}
_MOST_EVALUATIONS = 12


def quality_section(run: RunData, matches: Sequence[Match]) -> Section:
    """Precision, recall, F1 and mean IoU by version, and of evaluations by step."""
    records = list(chain.from_iterable(run.histories.values()))
    by_version = quality.of_ledger(records) or quality.of_matches(
        match for match in matches if match.purpose != EVALUATION
    )
    evaluations = run.first.evaluations if run.first else []
    parts: list[Part | None] = [
        _halves(by_version),
        _measures(
            "quality",
            "Match quality of rollouts",
            "Rollouts against ground truth before correction, by the version of the weights that gave them.",
            "version",
            _grouped(by_version),
        ),
        _evaluations(evaluations),
        _measures(
            "evaluations",
            "Evaluations",
            "Greedy answers to the validation set, at the step at which each evaluation began.",
            "step",
            [(record["begun_step"], record["ratios"]) for record in evaluations],
        ),
    ]
    return Section("quality", "Match quality", filled(parts) or (Sentence("No rollout was matched."),))


def _halves(by_version: Mapping[int, Quality]) -> Table:
    """The older half of the versions against the newer one, and all: the trend in numbers."""
    versions = list(by_version)
    parts = {"all versions": versions}
    if len(versions) > 1:
        middle = len(versions) // 2
        parts |= {_span(versions[:middle]): versions[:middle], _span(versions[middle:]): versions[middle:]}
    rows = []
    for name, members in parts.items():
        found = _sum([by_version[version] for version in members])
        values = (getattr(found, measure) for measure in _MEASURES)
        rows.append((name, *(number(value) for value in values), number(found.num_rollouts)))
    headings = ("version", *_NAMES.values(), "rollouts")
    return Table("Rollouts before correction", headings, tuple(rows) if versions else ())


def _evaluations(evaluations: Sequence[Record]) -> Table:
    rows = tuple(
        (
            number(record["begun_step"]),
            number(record["version"]),
            f"{record['counts']['num_answered']} of {record['counts']['num_wanted']}",
            *(number(record["ratios"].get(measure)) for measure in _MEASURES),
            str(record["end"]),
        )
        for record in evaluations[-_MOST_EVALUATIONS:]
    )
    title = f"The last {len(rows)} of {len(evaluations)} evaluations"
    headings = ("step", "version", "answered", *_NAMES.values(), "end")
    return Table(title, headings, rows)


def _span(versions: Sequence[int]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else str(versions[0])


def _grouped(by_version: Mapping[int, Quality]) -> list[tuple[float, dict[str, float]]]:
    """At most ``MOST_POINTS``: the counts of neighbouring versions are added up."""
    versions = list(by_version)
    size = max(1, -(-len(versions) // MOST_POINTS))
    groups = [versions[begin : begin + size] for begin in range(0, len(versions), size)]
    points = []
    for group in groups:
        found = _sum([by_version[version] for version in group])
        values = {measure: getattr(found, measure) for measure in _MEASURES}
        points.append((float(group[0]), {name: value for name, value in values.items() if value is not None}))
    return points


def _sum(parts: Sequence[Quality]) -> Quality:
    return Quality(
        num_rollouts=sum(part.num_rollouts for part in parts),
        num_predictions=sum(part.num_predictions for part in parts),
        num_truth=sum(part.num_truth for part in parts),
        num_pairs=sum(part.num_pairs for part in parts),
        sum_iou=sum(part.sum_iou for part in parts),
    )


def _measures(
    key: str, title: str, description: str, x_title: str, points: Sequence[tuple[float, Record]]
) -> Chart:
    return Chart(
        key=key,
        title=title,
        description=description,
        x_title=x_title,
        y_title="0 to 1",
        series=tuple(
            series_of(
                name, Mark.LINE, [(place, values[measure]) for place, values in points if measure in values]
            )
            for measure, name in _NAMES.items()
            if any(measure in values for _, values in points)
        ),
    )
