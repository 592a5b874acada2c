"""``swift-stage2 bench evaluate``: seconds that AP and all other metrics of one data set take, pycocotools beside.

Both get the same boxes as Python objects, drawn by a seed, and make COCO's numbers; ours also F1 at ten thresholds, the
parts and TIDE's types. Reading files and intervals are measured apart, because pycocotools has none.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.results import ResultTable, publish, say
from swift_stage2.demo.grounding_dataset import grounding_row
from swift_stage2.detections.objects import DetectionData, ObjectArrays, ScoreConvention, detection_data
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.errors import UserError
from swift_stage2.evaluate.intervals import DEFAULT_DRAWS, affordable_draws, intervals
from swift_stage2.evaluate.predictions import read_predictions, read_rows

_SIDE = 600
_BOXES_PER_IMAGE = 7


def run(options: argparse.Namespace, directory: Path) -> int:
    """Draws the files, evaluates them, and has pycocotools do the same.

    Raises:
        UserError: pycocotools is not installed.
    """
    try:
        cocoeval = importlib.import_module("pycocotools.cocoeval")
    except ImportError as error:
        raise UserError(
            "bench evaluate needs pycocotools; install it with pip install pycocotools"
        ) from error
    data, predictions = _draw(directory, options.images, options.classes)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        say(name)
        begun = perf_counter()
        result = work()
        seconds[name] = perf_counter() - begun
        return result

    rows = timed("read the data", lambda: read_rows(data))
    read = timed("read the predictions", lambda: read_predictions(predictions, rows))

    def score() -> tuple[DetectionScores, dict[str, float]]:
        scores = DetectionScores(detection_data([row.truth for row in rows], read, ScoreConvention.ONE))
        points = scores.points()
        scores.errors()
        return scores, points

    scores, points = timed("all metrics", score)
    draws = affordable_draws(scores, DEFAULT_DRAWS)
    timed(f"intervals, {draws} draws", lambda: intervals(scores.values, len(rows), draws))
    theirs = timed("pycocotools: COCO's metrics", lambda: _pycocotools(cocoeval, scores.data))
    difference = max(abs(points["eval/ap"] - theirs[0]), abs(points["eval/ar"] - theirs[8]))
    facts = {"seconds": seconds, "difference": difference, "num_objects": len(scores.data.truth)}
    publish(
        directory,
        "evaluate",
        facts,
        ResultTable(
            f"Seconds of {options.images:,} images with {len(scores.data.truth):,} true and "
            f"{len(scores.data.predicted):,} predicted objects of {options.classes} classes, once",
            ("what", "seconds"),
            [(name, f"{value:.2f}") for name, value in seconds.items()],
        ),
        f"AP and AR differ from pycocotools' by at most {difference:.1g}.",
    )
    return 0


def _draw(directory: Path, num_images: int, num_classes: int) -> tuple[Path, Path]:
    """Files of rows and predictions: noisy copies, some twice, some not, some of another class."""
    generator = np.random.default_rng(0)
    data, predictions = directory / "rows.jsonl", directory / "predictions.jsonl"
    with data.open("w", encoding="utf-8") as rows, predictions.open("w", encoding="utf-8") as lines:
        for number in range(num_images):
            num_boxes = int(generator.poisson(_BOXES_PER_IMAGE))
            corners = generator.integers(0, _SIDE // 2, (num_boxes, 2))
            boxes = np.hstack([corners, corners + generator.integers(4, _SIDE // 2, (num_boxes, 2))])
            labels = generator.integers(num_classes, size=num_boxes)
            copies = np.repeat(np.arange(num_boxes), generator.choice(3, num_boxes, p=[0.1, 0.8, 0.1]))
            found = boxes[copies] + generator.integers(-8, 9, (len(copies), 4))
            found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
            said = np.where(
                generator.random(len(copies)) < 0.1, (labels[copies] + 1) % num_classes, labels[copies]
            )
            true = [(f"class {label}", tuple(box)) for label, box in zip(labels, boxes.tolist(), strict=True)]
            rows.write(json.dumps(grounding_row(true, f"{number}.png")) + "\n")
            objects = {"ref": [f"class {label}" for label in said], "bbox": found.tolist()}
            line = {"image": f"{number}.png", "width": _SIDE, "height": _SIDE, "objects": objects}
            lines.write(json.dumps(line) + "\n")
    return data, predictions


def _pycocotools(cocoeval: Any, data: DetectionData) -> Any:
    """COCO's twelve numbers."""
    coco = importlib.import_module("pycocotools.coco")
    with redirect_stdout(StringIO()):
        gold = coco.COCO()
        gold.dataset = {
            "images": [{"id": number + 1} for number in range(data.num_images)],
            "categories": [{"id": number + 1, "name": name} for number, name in enumerate(data.classes)],
            "annotations": _annotations(data.truth),
        }
        gold.createIndex()
        found = cocoeval.COCOeval(gold, gold.loadRes(_annotations(data.predicted)), "bbox")
        found.evaluate()
        found.accumulate()
        found.summarize()
    return found.stats


def _annotations(side: ObjectArrays) -> list[dict[str, Any]]:
    sizes = (side.boxes[:, 2:] - side.boxes[:, :2]).tolist()
    columns = zip(
        side.images.tolist(),
        side.labels.tolist(),
        side.boxes.tolist(),
        sizes,
        side.scores.tolist(),
        strict=True,
    )
    return [
        {
            "id": number,
            "image_id": image + 1,
            "category_id": label + 1,
            "bbox": [*box[:2], *size],
            "area": size[0] * size[1],
            "iscrowd": 0,
            "score": score,
        }
        for number, (image, label, box, size, score) in enumerate(columns, start=1)
    ]
