"""AP and AR are pycocotools' own, on 1,000 random cases at once: a class is a case, for COCO counts each alone."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import pytest
from detection_sets import random_data
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swift_stage2.data.scores import DetectionData, DetectionScores, ObjectArrays

NUM_CASES = 1000
MOST_DETECTIONS = 100
TOLERANCE = 1e-6


def annotations(side: ObjectArrays) -> list[dict[str, Any]]:
    sizes = side.boxes[:, 2:] - side.boxes[:, :2]
    return [
        {
            "id": number + 1,
            "image_id": int(side.images[number]) + 1,
            "category_id": int(side.labels[number]) + 1,
            "bbox": [*side.boxes[number, :2].tolist(), *sizes[number].tolist()],
            "area": float(sizes[number].prod()),
            "iscrowd": 0,
            "score": float(side.scores[number]),
        }
        for number in range(len(side))
    ]


def pycocotools_of(data: DetectionData) -> COCOeval:
    """Not run yet."""
    with redirect_stdout(StringIO()):
        gold = COCO()
        gold.dataset = {
            "images": [{"id": number + 1} for number in range(data.num_images)],
            "categories": [{"id": number + 1, "name": name} for number, name in enumerate(data.classes)],
            "annotations": annotations(data.truth),
        }
        gold.createIndex()
        return COCOeval(gold, gold.loadRes(annotations(data.predicted)), "bbox")


def run(oracle: COCOeval) -> COCOeval:
    with redirect_stdout(StringIO()):
        oracle.evaluate()
        oracle.accumulate()
        if len(oracle.params.maxDets) == 3:
            oracle.summarize()
    return oracle


def test_every_curve_of_a_thousand_cases_is_pycocotools_own() -> None:
    data = random_data(7, num_images=4, num_classes=NUM_CASES, ties=True)
    oracle, scores = pycocotools_of(data), DetectionScores(data)
    oracle.params.maxDets = [MOST_DETECTIONS]  # a third of the time; the other limits are in the means
    points = scores.points()
    curves = run(oracle).eval
    assert curves["precision"].shape[2] == NUM_CASES
    assert (curves["precision"].max(axis=(0, 1, 3, 4)) > 0).sum() > NUM_CASES / 2
    for name in ("precision", "recall"):
        assert np.abs(curves[name][..., 0] - scores._coco.eval[name][..., -1]).max() < TOLERANCE
    of_cases = curves["precision"][:, :, :, 0, 0].mean(axis=(0, 1))
    mine = [points.get(f"class/{name}/ap", -1.0) for name in data.classes]
    assert np.abs(np.array(mine) - of_cases).max() < TOLERANCE
    assert points["eval/ap"] == pytest.approx(of_cases[of_cases >= 0].mean(), abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_every_mean_is_pycocotools_own(seed: int) -> None:
    data = random_data(seed, num_images=30, num_classes=4, ties=True)
    oracle, scores = run(pycocotools_of(data)), DetectionScores(data)
    points = scores.points()
    names = ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar1", "ar10"]
    names += ["ar", "ar_small", "ar_medium", "ar_large"]
    for name, expected in zip(names, oracle.stats, strict=True):
        assert points[f"eval/{name}"] == pytest.approx(expected, abs=TOLERANCE)


def test_only_the_best_hundred_of_an_image_and_class_count() -> None:
    """Most are copies of one box; what finds the other objects comes behind the hundredth."""
    data = random_data(3, num_images=3, num_classes=2, per_class=60.0)
    assert np.bincount(data.predicted.images * 2 + data.predicted.labels).max() > 60
    many = np.repeat(np.arange(len(data.predicted)), 3)
    crowded = ObjectArrays(
        *(getattr(data.predicted, name)[many] for name in ("images", "labels", "boxes", "scores"))
    )
    data = DetectionData(data.num_images, data.classes, data.truth, crowded)
    oracle, scores = run(pycocotools_of(data)), DetectionScores(data)
    points = scores.points()
    assert points["eval/ap"] == pytest.approx(oracle.stats[0], abs=TOLERANCE)
    assert points["eval/ar"] == pytest.approx(oracle.stats[8], abs=TOLERANCE)
