"""Intervals: an image that is drawn twice counts twice, their width is the binomial's, two sets share their draws."""

from __future__ import annotations

import numpy as np
import pytest
from detection_sets import hand_made, random_data

from swift_stage2.data.scores import RATIOS, DetectionData, DetectionScores, ObjectArrays

CAR = ("car", (10, 10, 110, 110))


def repeated(side: ObjectArrays, weights: np.ndarray) -> ObjectArrays:
    """The objects of images written out as often as each weighs."""
    sources = np.repeat(np.arange(len(weights)), weights)
    places = [
        (copy, place) for copy, image in enumerate(sources) for place in np.flatnonzero(side.images == image)
    ]
    chosen = np.array([place for _, place in places])
    copies = np.array([copy for copy, _ in places])
    return ObjectArrays(copies, side.labels[chosen], side.boxes[chosen], side.scores[chosen])


@pytest.mark.parametrize("seed", range(4))
def test_an_image_that_weighs_two_is_one_that_is_there_twice(seed: int) -> None:
    data = random_data(seed, num_images=12, num_classes=3, per_class=2.0)
    weights = np.random.default_rng(seed).multinomial(12, [1 / 12] * 12)
    assert weights.max() > 1
    written_out = DetectionData(
        12, data.classes, repeated(data.truth, weights), repeated(data.predicted, weights)
    )
    expected = DetectionScores(written_out).points()
    for name, (value,) in DetectionScores(data)._weighted(weights[:, None]).items():
        assert value == pytest.approx(expected.get(name, np.nan), nan_ok=True), name


def found_or_not(found: np.ndarray) -> DetectionScores:
    return DetectionScores(hand_made([[CAR]] * len(found), [[CAR] if each else [] for each in found]))


def test_the_interval_of_a_share_is_as_wide_as_the_binomial_one() -> None:
    found = np.random.default_rng(0).random(400) < 0.5
    scores = found_or_not(found)
    bounds = scores.intervals(1000)
    half = 1.96 * np.sqrt(found.mean() * (1 - found.mean()) / 400)
    for name in ("eval/recall", "class/car/recall"):
        assert bounds[name].high - bounds[name].low == pytest.approx(2 * half, rel=0.12)
        assert bounds[name].low < found.mean() < bounds[name].high
    assert {name.rsplit("/")[-1] for name in bounds} == set(RATIOS)
    assert "objects/0/recall" not in bounds
    assert scores.intervals(120) == scores.intervals(120)
    assert scores.intervals(0) == {}


def test_two_sets_are_compared_image_by_image() -> None:
    """The second finds what the first finds and a little more: alone their intervals overlap, paired they do not."""
    drawn = np.random.default_rng(1).random(400)
    first, second = found_or_not(drawn < 0.50), found_or_not(drawn < 0.53)
    alone = [each.intervals(300)["eval/recall"] for each in (first, second)]
    assert alone[0].high > alone[1].low
    assert second.intervals(300, minus=first)["eval/recall"].low > 0
    assert first.intervals(50, minus=first)["eval/f1"] == (0.0, 0.0)
