"""AP and AR are pycocotools' own."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from detection_sets import random_data
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swift_stage2.data.scores import DetectionData, DetectionScores, ObjectArrays

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
        oracle.summarize()
    return oracle


@pytest.mark.parametrize("seed", range(3))
def test_every_mean_is_pycocotools_own(seed: int) -> None:
    data = replace(random_data(seed, num_images=30, num_classes=4, ties=True), has_scores=True)
    oracle, scores = run(pycocotools_of(data)), DetectionScores(data)
    points = scores.points()
    names = ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar1", "ar10"]
    names += ["ar", "ar_small", "ar_medium", "ar_large"]
    for name, expected in zip(names, oracle.stats, strict=True):
        assert points[f"eval/{name}"] == pytest.approx(expected, abs=TOLERANCE)
    of_classes = oracle.eval["precision"][:, :, :, 0, -1].mean(axis=(0, 1))
    mine = [points[f"class/{name}/ap"] for name in data.classes]
    assert mine == pytest.approx(of_classes.tolist(), abs=TOLERANCE)
    plain = replace(data, predicted=replace(data.predicted, scores=np.ones(len(data.predicted))))
    plain_ap = run(pycocotools_of(plain)).stats[0]
    assert points["eval/ap_without_scores"] == pytest.approx(plain_ap, abs=TOLERANCE)
