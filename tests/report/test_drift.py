"""Match drift: what counts as a change, which answers are compared, and how sure a share is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.report.drift import MOST_ANSWERS, drift_of, interval, iou
from swift_stage2.report.matches import LoggedMatch, matches_of

THRESHOLD = 0.5
HERE, NEAR, FAR = [0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]


def answer(row: int, version: int, boxes: list[list[int] | None], **others: Any) -> LoggedMatch:
    """A box per ground-truth object, None where it was missed."""
    found = [box for box in boxes if box is not None]
    hit = [number for number, box in enumerate(boxes) if box is not None]
    record = {
        "time": float(version),
        "rank": 0,
        "sample": [version, 0, row, 0],
        "purpose": "training",
        "version": version,
        "images": [],
        "space": [100, 100],
        "truth": [{"label": "x", "box": [number, 0, number + 10, 10]} for number in range(len(boxes))],
        "predicted": [{"label": "x", "box": box} for box in found],
        "pairs": [[prediction, truth, 0.9] for prediction, truth in enumerate(hit)],
        "rollout": "",
        "target": "",
        "truncated": False,
        "dropped": {},
    }
    (match,), odd = matches_of([record | others])
    assert odd == 0
    return match


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        (HERE, HERE, 0),
        (HERE, NEAR, 0),
        (HERE, [0, 0, 10, 5], 0),  # an IoU at the threshold, and one under it
        (HERE, [0, 0, 10, 4], 1),
        (HERE, FAR, 1),
        (HERE, None, 1),
        (None, HERE, 1),
        (None, None, 0),
    ],
)
def test_a_partner_changes_when_it_comes_goes_or_moves_away(
    one: list[int] | None, other: list[int] | None, changed: int
) -> None:
    (drift,) = drift_of([answer(1, 4, [one, HERE]), answer(1, 7, [other, HERE])], THRESHOLD)
    assert (drift.lag, drift.num_boxes, drift.num_changed, drift.num_images) == (3, 2, changed, 1)


def test_only_the_same_image_for_the_same_purpose_is_compared() -> None:
    answers = [
        answer(1, 1, [HERE]),
        answer(2, 2, [FAR]),
        answer(1, 3, [FAR], purpose="evaluation"),
        answer(1, 4, [HERE, HERE]),  # other ground truth
        answer(3, 5, []),
        answer(3, 6, []),
    ]
    assert drift_of(answers, THRESHOLD) == []


def test_the_same_version_asked_twice_is_lag_zero() -> None:
    twice = [answer(1, 5, [HERE]), answer(1, 5, [FAR], sample=[9, 9, 1, 0])]
    (drift,) = drift_of(twice, THRESHOLD)
    assert (drift.lag, drift.share) == (0, 1.0)


def test_of_an_image_that_was_asked_often_the_newest_answers_count() -> None:
    often = [answer(1, version, [HERE if version >= 10 else FAR]) for version in range(MOST_ANSWERS + 10)]
    found = drift_of(often, THRESHOLD)
    assert sum(drift.num_boxes for drift in found) == MOST_ANSWERS * (MOST_ANSWERS - 1) // 2
    assert sum(drift.num_changed for drift in found) == 0
    assert max(drift.lag for drift in found) == MOST_ANSWERS - 1


images = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)).map(lambda p: (min(p), p[1])), min_size=1)


@given(images)
def test_the_interval_holds_the_share(by_image: list[tuple[int, int]]) -> None:
    changed, boxes = (sum(column) for column in zip(*by_image, strict=True))
    low, high = interval(changed, boxes, by_image)
    assert 0 <= low <= changed / boxes <= high <= 1
    assert low < high


def test_boxes_that_change_together_count_for_fewer() -> None:
    together = [(4, 4), (0, 4)] * 10
    apart = [(2, 4)] * 20
    assert interval(40, 80, apart)[1] < interval(40, 80, together)[1]


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(5)
    held = 0
    for _ in range(400):
        by_image = []
        for _ in range(60):
            chance = rng.choice((0.05, 0.55))  # 0.3 on average; images differ
            by_image.append((sum(rng.random() < chance for _ in range(6)), 6))
        low, high = interval(sum(changed for changed, _ in by_image), 360, by_image)
        held += low <= 0.3 <= high
    assert 0.92 <= held / 400 <= 0.98


boxes = st.tuples(*[st.floats(0, 20)] * 4).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3]))


@given(boxes, boxes)
def test_iou_is_symmetric_and_within_its_range(one: tuple[float, ...], other: tuple[float, ...]) -> None:
    assert 0 <= iou(one, other) <= 1  # type: ignore[arg-type]
    assert iou(one, other) == iou(other, one)  # type: ignore[arg-type]
