"""Measures how fast matches grow old: the share of ground-truth boxes whose partner changes with newer weights. Pure.

The same image asked twice gives every ground-truth box two partners. Its partner changed if it was matched once and
missed the other time, or if the two predicted boxes overlap by less than the matching threshold. Two answers of one
version differ by sampling alone: lag 0 is the baseline. ``docs/design/report.md`` gives the reasons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from swift_stage2.config import MatchingConfig
from swift_stage2.report.content import (
    Chart,
    Mark,
    Part,
    Section,
    Sentence,
    Series,
    Table,
    Tone,
    filled,
    number,
)
from swift_stage2.report.matches import Box, Match
from swift_stage2.report.run_data import RunData

MOST_ANSWERS = 24
"""Of one image, the newest: the pairs of answers grow with their square."""
_Z = 1.959963984540054  # of a 95 % interval
DEFINITION = (
    "A ground-truth box counts as changed when it is matched in only one of two answers to the same image, or when the "
    "two predicted boxes overlap with an IoU under the matching threshold; lag 0 is the noise of sampling."
)


@dataclass(frozen=True, slots=True, kw_only=True)
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


def drift_of(matches: Iterable[Match], threshold: float) -> list[Drift]:
    """A measurement per purpose and lag, in order; pairs of answers with unlike ground truth are left out."""
    by_image: dict[tuple[str, int], list[Match]] = defaultdict(list)
    for match in matches:
        by_image[match.purpose, match.row].append(match)
    counts: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for (purpose, row), answers in by_image.items():
        for one, other in combinations(sorted(answers, key=lambda match: match.time)[-MOST_ANSWERS:], 2):
            if one.truth != other.truth or one.space != other.space or not one.truth:
                continue
            changed, boxes = counts[purpose, abs(other.version - one.version)][row]
            counts[purpose, abs(other.version - one.version)][row] = [
                changed + num_changed(one, other, threshold),
                boxes + len(one.truth),
            ]
    return [_drift(purpose, lag, counts[purpose, lag]) for purpose, lag in sorted(counts)]


def num_changed(one: Match, other: Match, threshold: float) -> int:
    """Ground-truth boxes whose partner differs between two answers."""
    return sum(
        _differ(mine, theirs, threshold)
        for mine, theirs in zip(_partners(one), _partners(other), strict=True)
    )


def iou(one: Box, other: Box) -> float:
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


def _drift(purpose: str, lag: int, by_image: Mapping[int, Sequence[int]]) -> Drift:
    pairs = [(changed, size) for changed, size in by_image.values()]
    changed, boxes = (sum(column) for column in zip(*pairs, strict=True))
    low, high = interval(changed, boxes, pairs)
    return Drift(
        purpose=purpose,
        lag=lag,
        num_boxes=boxes,
        num_changed=changed,
        num_images=len(pairs),
        low=low,
        high=high,
    )


def _partners(match: Match) -> list[Box | None]:
    """By ground-truth box, the predicted box that it was matched to."""
    partners: list[Box | None] = [None] * len(match.truth)
    for prediction, truth, _ in match.pairs:
        partners[truth] = match.predicted[prediction].box
    return partners


def _differ(one: Box | None, other: Box | None, threshold: float) -> bool:
    if one is None or other is None:
        return one is not other
    return one != other and iou(one, other) < threshold


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


_FEW_BOXES = 30


def drift_section(run: RunData, matches: Sequence[Match]) -> Section:
    """The share of boxes that change their partner, by version difference."""
    threshold = run.number_setting("stage2_ab", "channel_b", "matching", "iou_threshold")
    threshold = MatchingConfig().iou_threshold if threshold is None else threshold
    found = drift_of(matches, threshold)
    if not found:
        return Section("drift", "Match drift", (Sentence(DEFINITION), Sentence("No image was asked twice.")))
    rows = tuple(
        (
            f"{one.purpose}, lag {one.lag}",
            f"{one.share:.1%}",
            f"{one.low:.1%} to {one.high:.1%}",
            number(one.num_boxes),
            number(one.num_images),
        )
        for one in _shown(found)
    )
    chart = Chart(
        key="drift",
        title="Boxes whose partner changed",
        description="Percent of ground-truth boxes with another partner, by the difference of the two versions.",
        x_title="version difference",
        y_title="percent",
        series=tuple(
            _drift_series(purpose, [one for one in _shown(found) if one.purpose == purpose])
            for purpose in dict.fromkeys(one.purpose for one in found)
        ),
    )
    headings = ("asked for", "changed", "95 % interval", "boxes", "images")
    table = Table(f"Changed partners, matching threshold {threshold:g}", headings, rows)
    few = any(one.num_boxes < _FEW_BOXES for one in _shown(found))
    parts: list[Part | None] = [
        Sentence(DEFINITION),
        Sentence(f"Shares of fewer than {_FEW_BOXES} boxes say little: read their intervals.", Tone.WARN)
        if few
        else None,
        table,
        chart,
    ]
    return Section("drift", "Match drift", filled(parts))


def _shown(found: Sequence[Drift]) -> list[Drift]:
    """Every lag while they are few; else the first ones and those that double."""
    few = [one for one in found if one.lag <= 8 or one.lag & (one.lag - 1) == 0]
    return few if len(found) > 24 else list(found)


def _drift_series(purpose: str, found: Sequence[Drift]) -> Series:
    return Series(
        purpose,
        Mark.POINTS,
        tuple(float(one.lag) for one in found),
        tuple(100 * one.share for one in found),
        tuple(100 * one.low for one in found),
        tuple(100 * one.high for one in found),
    )
