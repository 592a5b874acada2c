"""Measures how fast matches grow old: the share of ground-truth boxes whose partner changes with newer weights. Pure.

The same image asked twice gives every ground-truth box two partners. Its partner changed if it was matched once and
missed the other time, or if the two predicted boxes overlap by less than the matching threshold. Two answers of one
version differ by sampling alone: lag 0 is the baseline. ``docs/design/report.md`` gives the reasons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from swift_stage2.config import MatchingConfig
from swift_stage2.pages.content import (
    Chart,
    Mark,
    Section,
    Sentence,
    Table,
    Tone,
    banded,
    filled,
    number,
)
from swift_stage2.report.matches import LoggedMatch
from swift_stage2.report.run_data import RunData

MOST_ANSWERS = 24
"""Of one image, the newest: the pairs of answers grow with their square."""
_MANY_LAGS = 24
_FEW_BOXES = 30
_Z = 1.959963984540054  # of a 95 % interval
DEFINITION = (
    "A ground-truth box counts as changed when it is matched in only one of two answers to the same image, or when the "
    "two predicted boxes overlap with an IoU under the matching threshold; lag 0 is the noise of sampling."
)


@dataclass(frozen=True, slots=True)
class Drift:
    """One lag. ``low`` and ``high`` bound the share with 95 % confidence, images taken as what was drawn."""

    purpose: str
    lag: int
    num_boxes: int
    num_changed: int
    num_images: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Of boxes that changed their partner."""
        return self.num_changed / self.num_boxes


def drift_of(matches: Iterable[LoggedMatch], threshold: float) -> list[Drift]:
    """A measurement per purpose and lag, in order; pairs of answers with unlike truth are left out, and points."""
    by_image: dict[tuple[str, int], list[LoggedMatch]] = defaultdict(list)
    for match in matches:
        if match.is_of_points:
            continue  # two points have no overlap
        by_image[match.purpose, match.row].append(match)
    by_lag: dict[tuple[str, int], dict[int, tuple[int, int]]] = defaultdict(dict)
    for (purpose, row), answers in by_image.items():
        for one, other in combinations(sorted(answers, key=lambda match: match.time)[-MOST_ANSWERS:], 2):
            if one.truth != other.truth or one.space != other.space or not one.truth:
                continue
            images = by_lag[purpose, abs(other.version - one.version)]
            changed, boxes = images.get(row, (0, 0))
            images[row] = changed + _num_changed(one, other, threshold), boxes + len(one.truth)
    return [_drift(purpose, lag, list(by_lag[purpose, lag].values())) for purpose, lag in sorted(by_lag)]


def iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union; 0 for two boxes without area."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    union = _area(one) + _area(other) - shared
    return shared / union if union > 0 else 0.0


def interval(changed: int, boxes: int, by_image: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Wilson's 95 % interval for a share of boxes that come in images.

    Boxes of one image change together, so they count for fewer: their number is divided by the design effect, the
    variance over images as it is by what it would be if boxes were independent; at least 1 (Kish, 1965).
    """
    share = changed / boxes
    size = boxes / _design_effect(share, boxes, by_image)
    middle = (share + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * math.sqrt(share * (1 - share) / size + _Z**2 / (4 * size**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _design_effect(share: float, boxes: int, by_image: Sequence[tuple[int, int]]) -> float:
    images = len(by_image)
    independent = share * (1 - share) / boxes
    if images < 2 or not independent:
        return boxes / images  # an image counts once: the most cautious
    spread = sum((changed - share * size) ** 2 for changed, size in by_image)
    return max(1.0, images / (images - 1) * spread / boxes**2 / independent)


def _drift(purpose: str, lag: int, by_image: Sequence[tuple[int, int]]) -> Drift:
    changed, boxes = (sum(column) for column in zip(*by_image, strict=True))
    return Drift(purpose, lag, boxes, changed, len(by_image), *interval(changed, boxes, by_image))


def _num_changed(one: LoggedMatch, other: LoggedMatch, threshold: float) -> int:
    """Ground-truth boxes whose partner differs between two answers."""
    partners = zip(_partners(one), _partners(other), strict=True)
    return sum(_differ(mine, theirs, threshold) for mine, theirs in partners)


def _partners(match: LoggedMatch) -> list[Sequence[float] | None]:
    """By ground-truth box, the predicted box that it was matched to."""
    partners: list[Sequence[float] | None] = [None] * len(match.truth)
    for prediction, truth, _ in match.pairs:
        partners[truth] = match.predicted[prediction].box
    return partners


def _differ(one: Sequence[float] | None, other: Sequence[float] | None, threshold: float) -> bool:
    if one is None or other is None:
        return one is not other
    return one != other and iou(one, other) < threshold


def _area(box: Sequence[float]) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def drift_section(run: RunData, matches: Sequence[LoggedMatch]) -> Section:
    """The share of boxes that change their partner, by version difference."""
    threshold = run.number_setting("stage2_ab", "channel_b", "matching", "iou_threshold")
    threshold = MatchingConfig().iou_threshold if threshold is None else threshold
    found = drift_of(matches, threshold)
    if not found:
        why = "No image was asked twice."
        if any(match.is_of_points for match in matches):
            why = "It is measured of boxes; this run's objects are points."
        return Section("drift", "Match drift", (Sentence(DEFINITION), Sentence(why)))
    if len(found) > _MANY_LAGS:  # the first ones and those that double
        found = [one for one in found if one.lag <= 8 or one.lag & (one.lag - 1) == 0]
    rows = tuple(
        (
            f"{one.purpose}, lag {one.lag}",
            f"{one.share:.1%}",
            f"{one.low:.1%} to {one.high:.1%}",
            number(one.num_boxes),
            number(one.num_images),
        )
        for one in found
    )
    by_purpose = {purpose: list(lags) for purpose, lags in groupby(found, key=lambda one: one.purpose)}
    chart = Chart(
        key="drift",
        title="Boxes whose partner changed",
        description="Percent of ground-truth boxes with another partner, by the difference of the two versions.",
        x_title="version difference",
        y_title="percent",
        series=tuple(
            banded(
                purpose,
                Mark.POINTS,
                [(float(one.lag), 100 * one.share, 100 * one.low, 100 * one.high) for one in lags],
            )
            for purpose, lags in by_purpose.items()
        ),
    )
    headings = ("asked for", "changed", "95 % interval", "boxes", "images")
    few = Sentence(f"Shares of fewer than {_FEW_BOXES} boxes say little: read their intervals.", Tone.WARN)
    parts = [
        Sentence(DEFINITION),
        few if any(one.num_boxes < _FEW_BOXES for one in found) else None,
        Table(f"Changed partners, matching threshold {threshold:g}", headings, rows),
        chart,
    ]
    return Section("drift", "Match drift", filled(parts))
