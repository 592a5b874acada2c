"""Precision, recall and F1 are those of training's matching; error types, parts and limits; intervals."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from detection_sets import hand_made, random_data

from swift_stage2.channel_b.matching import iou_matrix, match_objects
from swift_stage2.config import MatchingConfig
from swift_stage2.data.scores import RATIOS, THRESHOLDS, DetectionData, DetectionScores
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
    for threshold, number, expected in zip(THRESHOLDS, scores.num_matched, by_threshold, strict=True):
        assert number / len(data.truth) == pytest.approx(expected["recall"], abs=1e-12), threshold
    assert {name: found[f"eval/{name}"] for name in by_threshold[0]} == pytest.approx(by_threshold[0])
    for name in ("precision", "recall", "f1"):
        mean = np.mean([each[name] for each in by_threshold])
        assert found[f"eval/{name}_50_95"] == pytest.approx(mean)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_told_by_image_with_the_numbers_of_their_objects_there(seed: int) -> None:
    data = random_data(seed, num_images=12, num_classes=2, per_class=4.0)
    matched = DetectionScores(data).matched
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


def test_parts_by_class_and_number_add_up() -> None:
    truth = [[], [("car", CAR)], [("car", CAR), ("dog", (0, 0, 32, 31))]]
    predicted = [[("car", CAR)], [("car", CAR)], [("dog", (0, 0, 32, 40))]]
    found = DetectionScores(hand_made(truth, predicted)).points()
    assert found["class/car/precision"] == found["class/car/recall"] == 0.5
    assert found["class/dog/f1"] == found["objects/1/f1"] == found["class/car/mean_iou"] == 1.0
    assert found["class/dog/mean_iou"] == found["objects/2-3/mean_iou"] == pytest.approx(31 / 40)
    assert found["objects/0/precision"] == 0.0
    assert "objects/0/recall" not in found
    assert found["objects/2-3/recall"] == 0.5


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


def test_calibration_is_told_by_scores_of_one_tenth() -> None:
    cars = [("car", CAR), ("car", DOG), ("dog", DOG), ("dog", CAR), ("car", (300, 0, 310, 10))]
    data = replace(hand_made([[("car", CAR), ("dog", DOG)]], [cars]), has_scores=True)

    def scores(*values: float) -> DetectionScores:
        return DetectionScores(replace(data, predicted=replace(data.predicted, scores=np.array(values))))

    found = scores(1.0, 0.9, 0.55, 0.5, 0.0)  # right, false, right, false, false
    bins = [(0.0, 0.1, 1, 0.0, 0.0), (0.5, 0.6, 2, 0.525, 0.5), (0.9, 1.0, 2, 0.95, 0.5)]
    assert found.calibration == [pytest.approx(each) for each in bins]
    assert found.points()["eval/ece"] == pytest.approx((1 * 0.0 + 2 * 0.025 + 2 * 0.45) / 5)
    logits = scores(7.0, 0.9, 0.5, 0.5, 0.0)
    assert logits.calibration == []
    assert "eval/ece" not in logits.points()
    assert (
        not {"eval/ece", "eval/ap_without_scores"}
        & DetectionScores(replace(data, has_scores=False)).points().keys()
    )


ONE_CAR = ("car", (10, 10, 110, 110))


def found_or_not(found: np.ndarray) -> DetectionScores:
    return DetectionScores(hand_made([[ONE_CAR]] * len(found), [[ONE_CAR] if each else [] for each in found]))


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
