"""Precision, recall and F1 are those of training's matching; error types, parts and limits on images written out."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from detection_sets import hand_made, random_data
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_stage2.channel_b.matching import iou_matrix, match_objects
from swift_stage2.config import MatchingConfig
from swift_stage2.data.scores import THRESHOLDS, DetectionData, DetectionScores
from swift_stage2.records import match_ratios

CAR, DOG = (10, 10, 110, 110), (200, 200, 260, 260)


def matched_one_by_one(data: DetectionData, threshold: float) -> dict[str, float]:
    """Image by image through training's own function."""
    settings = {**asdict(MatchingConfig(iou_threshold=threshold)), "top_k": 10_000}
    del settings["max_distance"]  # of points
    del settings["same_label"]
    ious: list[float] = []
    for image in range(data.num_images):
        predicted, true = data.predicted.images == image, data.truth.images == image
        same = np.equal.outer(data.predicted.labels[predicted], data.truth.labels[true])
        ious += match_objects(
            data.predicted.boxes[predicted], data.truth.boxes[true], allowed=same, **settings
        ).ious
    return match_ratios(
        num_predictions=len(data.predicted),
        num_ground_truth=len(data.truth),
        num_pairs=len(ious),
        sum_iou=sum(ious),
    )


@pytest.mark.parametrize("seed", range(5))
def test_precision_recall_and_f1_are_those_of_training_at_every_threshold(seed: int) -> None:
    data = random_data(seed, num_images=30, num_classes=2, per_class=8.0)
    scores = DetectionScores(data)
    found, by_threshold = scores.points(), [matched_one_by_one(data, float(each)) for each in THRESHOLDS]
    for threshold, pairs, expected in zip(THRESHOLDS, scores.pairs, by_threshold, strict=True):
        assert len(pairs) / len(data.truth) == pytest.approx(expected["recall"], abs=1e-12), threshold
    assert {name: found[f"eval/{name}"] for name in by_threshold[0]} == pytest.approx(by_threshold[0])
    for name in ("precision", "recall", "f1"):
        mean = np.mean([each[name] for each in by_threshold])
        assert found[f"eval/{name}_50_95"] == pytest.approx(mean)


corners = st.tuples(*[st.integers(0, 4)] * 4)
boxes = corners.map(lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])))
objects = st.lists(st.tuples(st.sampled_from("ab"), boxes), max_size=4)


def iou_of_cells(*both: tuple[int, ...]) -> Fraction:
    one, other = ({(x, y) for x in range(c[0], c[2]) for y in range(c[1], c[3])} for c in both)
    return Fraction(len(one & other), len(one | other)) if one | other else Fraction(0)


def best_pairs(predicted: list[Any], true: list[Any]) -> tuple[int, Fraction]:
    """By trying every one-to-one assignment: most hits, then the largest sum of IoU."""
    best = (0, Fraction(0))
    slots = [*range(len(true)), *([None] * len(predicted))]
    for chosen in set(itertools.permutations(slots, len(predicted))):
        ious = [
            iou_of_cells(predicted[i][1], true[j][1])
            for i, j in enumerate(chosen)
            if j is not None and predicted[i][0] == true[j][0]
        ]
        hits = [iou for iou in ious if iou >= Fraction(1, 2)]
        best = max(best, (len(hits), sum(hits, Fraction(0))))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(objects, objects), min_size=1, max_size=2))
def test_whole_numbers_equal_brute_force(images: list[tuple[list[Any], list[Any]]]) -> None:
    score = DetectionScores(hand_made([t for _, t in images], [p for p, _ in images])).points()
    found = [best_pairs(predicted, true) for predicted, true in images]
    expected = match_ratios(
        num_predictions=sum(len(predicted) for predicted, _ in images),
        num_ground_truth=sum(len(true) for _, true in images),
        num_pairs=sum(hits for hits, _ in found),
        sum_iou=float(sum((iou for _, iou in found), Fraction(0))),
    )
    assert {name: score.get(f"eval/{name}") for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_told_by_image_with_the_numbers_of_their_objects_there(seed: int) -> None:
    data = random_data(seed, num_images=12, num_classes=2, per_class=4.0)
    matched = DetectionScores(data).matched()
    assert len(matched) == data.num_images
    for image, pairs in enumerate(matched):
        predicted, true = data.predicted.images == image, data.truth.images == image
        for prediction, truth, iou in pairs:
            boxes = data.predicted.boxes[predicted][[prediction]], data.truth.boxes[true][[truth]]
            assert iou_matrix(*boxes)[0, 0] == iou >= 0.5
            assert data.predicted.labels[predicted][prediction] == data.truth.labels[true][truth]
    expected = matched_one_by_one(data, 0.5)
    assert sum(map(len, matched)) / len(data.truth) == pytest.approx(expected["recall"])


def test_every_kind_of_error_is_told_by_its_type() -> None:
    truth = [[("car", CAR)], [("car", CAR)], [("car", CAR)], [("car", CAR), ("dog", DOG)], [("dog", DOG)]]
    predicted = [
        [("car", CAR), ("car", (12, 10, 112, 110))],  # Dupe
        [("dog", CAR)],  # Cls
        [("car", (60, 10, 160, 110))],  # Loc
        [("car", CAR)],  # Miss
        [("dog", DOG), ("car", (300, 10, 330, 40)), ("car", (220, 220, 280, 280))],  # Bkg, Both
    ]
    errors = DetectionScores(hand_made(truth, predicted)).errors()
    assert {name: error["count"] for name, error in errors.items()} == dict.fromkeys(errors, 1)
    assert errors["Miss"]["lost_ap50"] > 0


def test_parts_by_class_number_and_size_add_up() -> None:
    truth = [[], [("car", CAR)], [("car", CAR), ("dog", (0, 0, 32, 31))]]
    predicted = [[("car", CAR)], [("car", CAR)], [("dog", (0, 0, 32, 40))]]
    found = DetectionScores(hand_made(truth, predicted)).points()
    assert found["class/car/precision"] == found["class/car/recall"] == 0.5
    assert found["class/dog/f1"] == 1.0
    assert found["objects/0/precision"] == 0.0
    assert "objects/0/recall" not in found
    assert found["objects/1/f1"] == 1.0
    assert found["objects/2-3/recall"] == 0.5
    assert found["size/small/f1"] == 1.0  # the box is medium, its true object small
    assert found["size/large/recall"] == 0.5
    assert "size/medium/precision" not in found


def test_perfect_empty_and_absent_answers() -> None:
    truth = [[("car", CAR), ("dog", DOG)], [("dog", DOG)]]
    perfect = DetectionScores(hand_made(truth, truth)).points()
    names = ("ap", "ap50", "ar", "precision", "recall", "f1_50_95")
    assert [perfect[f"eval/{name}"] for name in names] == pytest.approx([1.0] * len(names))
    silent = DetectionScores(hand_made(truth, [[], []]))
    assert silent.points()["eval/ap"] == silent.points()["eval/recall"] == 0.0
    assert "eval/precision" not in silent.points()
    assert silent.errors()["Miss"]["count"] == 3
    nothing = DetectionScores(hand_made([[], []], [[], [("car", CAR)]])).points()
    assert nothing["eval/precision"] == 0.0
    assert "eval/ap" not in nothing
    assert DetectionScores(hand_made([[]], [[]])).points() == {}
