"""Adds up how good rollouts were, by the version that gave them. Pure.

From the ledger's ``matched`` records, which tell of every rollout that became a segment; from the matches where
there is no ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swift_stage2.report.matches import Match
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
