"""Numbers as papers print them, each against one that is counted in another way: permutations, sets, exact loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from detection_sets import Boxes, hand_made, random_data

from swift_stage2.data.paper_scores import MEANINGS, all_points
from swift_stage2.data.scores import ASPECTS, ERRORS, THRESHOLDS, DetectionData, DetectionScores, ObjectArrays

CAR, DOG = ("car", (10, 10, 110, 110)), ("dog", (200, 200, 260, 260))
Box = Sequence[float]


def drawn(seed: int) -> DetectionData:
    """Every fifth image shows nothing and no image shows the last class, whatever is predicted there."""
    data = random_data(seed, num_images=60, num_classes=4, per_class=0.8)
    true, kept = data.truth, (data.truth.images % 5 > 0) & (data.truth.labels < 3)
    shown = ObjectArrays(true.images[kept], true.labels[kept], true.boxes[kept], true.scores[kept])
    return replace(data, truth=shown)


def listed(data: DetectionData) -> list[list[Boxes]]:
    """By image what was said and what is true."""
    images: list[list[Boxes]] = [[[], []] for _ in range(data.num_images)]
    for number, side in enumerate((data.predicted, data.truth)):
        for image, label, box in zip(side.images, side.labels, side.boxes.tolist(), strict=True):
            images[image][number].append((str(label), box))  # type: ignore[attr-defined]
    return images


def exact_iou(one: Box, other: Box) -> Fraction:
    x1, y1, x2, y2 = map(Fraction, [*map(max, one[:2], other[:2]), *map(min, one[2:], other[2:])])
    shared = max(x2 - x1, Fraction()) * max(y2 - y1, Fraction())
    areas = sum((Fraction(c) - Fraction(a)) * (Fraction(d) - Fraction(b)) for a, b, c, d in (one, other))
    return shared / (areas - shared) if shared else Fraction()


def most_pairs(said: Sequence[Box], true: Sequence[Box], least: float) -> int:
    """Of the one assignment, among all, that has most of 1 + IoU."""
    few, many = sorted((said, true), key=len)
    ious = [[exact_iou(one, other) for other in many] for one in few]
    ways = permutations(range(len(many)), len(few))
    found = [[iou for n, m in enumerate(way) if float(iou := ious[n][m]) >= least] for way in ways]
    return len(max(found, key=lambda pairs: len(pairs) + sum(pairs)))


@pytest.mark.parametrize("seed", range(3))
def test_f1_is_that_of_the_best_of_all_permutations(seed: int) -> None:
    data = drawn(seed)
    keys = [(sides, label) for sides in listed(data) for label in "012"]
    groups = [[[box for name, box in side if name == label] for side in sides] for sides, label in keys]
    assert 3 <= max(len(true) for _, true in groups) <= 5
    num_pairs = [sum(most_pairs(*sides, least) for sides in groups) for least in THRESHOLDS]
    f1 = 2 * np.array(num_pairs) / (len(data.predicted) + len(data.truth))
    points = all_points(DetectionScores(data))
    found = [points[f"eval/{name}"] for name in ("f1", "f1_95", "f1_50_95")]
    assert found == pytest.approx([f1[0], f1[-1], f1.mean()])


def aspect(box: Box) -> str:
    width, height = box[2] - box[0], box[3] - box[1]
    return ASPECTS[sum((4 * width >= height, 2 * width >= height, width > 2 * height, width > 4 * height))]


def test_boxes_are_told_by_their_shape_and_a_pair_where_its_true_object_is() -> None:
    data, generator = drawn(0), np.random.default_rng(1)
    for side in (data.predicted, data.truth):  # long ones, exact limits, lines and dots
        stretch = generator.choice([0, 1, 2, 4, 8], (len(side), 2)) * generator.choice(
            [10, 12], (len(side), 1)
        )
        side.boxes[:, 2:] = side.boxes[:, :2] + stretch
    scores, counted = DetectionScores(data), Counter[tuple[str, int]]()
    for (said, true), pairs in zip(listed(data), scores.matched, strict=True):
        of_pairs = {one: true[other][1] for one, other, _ in pairs}
        counted.update((aspect(of_pairs.get(n, box)), 0) for n, (_, box) in enumerate(said))
        counted.update((aspect(box), 1) for _, box in true)
        counted.update((aspect(box), 2) for box in of_pairs.values())
    assert scores.counts("aspect") == {name: tuple(counted[name, n] for n in range(3)) for name in ASPECTS}
    assert sum(map(len, scores.matched)) > 5


def test_errors_by_number_of_objects_are_those_of_its_images_and_add_up() -> None:
    for scores in (DetectionScores(drawn(seed)) for seed in range(3)):
        parts = scores.errors_by_number().values()
        assert sum(each["images"] for each in parts) == 60
        for name, error in scores.errors().items():
            assert sum(each[name] for each in parts) == error["count"]
    truth = [[], [CAR], [CAR, DOG], [CAR]]
    predicted = [[CAR, DOG], [("dog", CAR[1])], [CAR], [CAR, ("car", (12, 10, 112, 110))]]
    expected = {"0": {"Bkg": 2}, "1": {"images": 2, "Cls": 1, "Dupe": 1}, "2-3": {"Miss": 1}}
    none = {"images": 1, **dict.fromkeys(ERRORS, 0)}
    found = DetectionScores(hand_made(truth, predicted)).errors_by_number()
    assert found == {name: none | counts for name, counts in expected.items()}


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_images_are_those_of_sets_and_loops(seed: int) -> None:
    data = drawn(seed)
    images = listed(data)
    named, shown = ({(n, label) for n, sides in enumerate(images) for label, _ in sides[k]} for k in (0, 1))
    absent = {(n, label) for n in range(60) for _, label in shown} - shown
    on_empty = [len(said) for said, true in images if not true]
    alone = [(said, *true) for said, true in images if len(true) == 1]
    num_right = sum(exact_iou(said[0][1], box) >= Fraction(1, 2) for said, (_, box) in alone if said)
    expected = {
        "false_empty": sum(map(bool, on_empty)) / len(on_empty),
        "false_empty_boxes": sum(on_empty) / len(on_empty),
        "false_absent": len(absent & named) / len(absent),
        "acc_50": num_right / len(alone),
    }
    points = all_points(DetectionScores(data))
    assert {name: points[f"eval/{name}"] for name in expected} == pytest.approx(expected)
    assert 0 < min(expected.values()) <= expected["acc_50"] < 1
    silent = all_points(DetectionScores(hand_made([[CAR, CAR]], [[]])))  # one class, and no image without it
    assert silent.keys() & MEANINGS.keys() == {"eval/f1_95"}
