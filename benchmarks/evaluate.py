"""``swift-stage2 bench evaluate``: seconds that AP and all other metrics of one data set take, peers beside.

pycocotools and, where it is installed, globox get the same boxes as Python objects, drawn by a seed, and make COCO's
numbers; ours also F1 at ten thresholds, the parts and TIDE's types. Intervals and rows, which no peer has, are measured
apart; so is the reading of COCO's file of the truth, in which `import coco` checks every annotation.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.estimates import Spread
from benchmarks.results import ResultTable, in_turns, publish, say
from swift_stage2.convert.coco_file import CocoFile
from swift_stage2.convert.import_report import ImportReport
from swift_stage2.demo.grounding_dataset import grounding_row
from swift_stage2.detections.objects import DetectionData, ObjectArrays, ScoreConvention, detection_data
from swift_stage2.detections.prediction_files import read_predictions, read_rows
from swift_stage2.detections.scores import DetectionScores
from swift_stage2.errors import UserError
from swift_stage2.evaluate.intervals import DEFAULT_DRAWS, affordable_draws, intervals

_SIDE = 600
_BOXES_PER_IMAGE = 7


def run(options: argparse.Namespace, directory: Path) -> int:
    """Draws the files, reads and evaluates them, and has the peers do the same, in turns.

    Raises UserError: pycocotools is not installed.
    """
    try:
        cocoeval = importlib.import_module("pycocotools.cocoeval")
    except ImportError as error:
        raise UserError(
            "bench evaluate needs pycocotools; install it with pip install pycocotools"
        ) from error
    data, predictions = _draw(directory, options.images, options.classes)
    rows = read_rows(data)
    read = read_predictions(predictions, rows)
    truths = [row.truth for row in rows]

    def score() -> DetectionScores:
        found = DetectionScores(detection_data(truths, read, ScoreConvention.ONE))
        found.points()
        found.errors()
        return found

    scores = score()
    draws = affordable_draws(scores, DEFAULT_DRAWS)
    coco, results = _write_coco(directory, scores.data)
    theirs: dict[str, tuple[float, float]] = {}
    arms: dict[str, Callable[[], Any]] = {
        "read the data": lambda: read_rows(data),
        "read the predictions": lambda: read_predictions(predictions, rows),
        "all metrics": score,
        f"intervals, {draws} draws": lambda: intervals(scores.values, len(rows), draws),
        "pycocotools: COCO's metrics": lambda: theirs.update(pycocotools=_pycocotools(cocoeval, scores.data)),
        "COCO's file, as import coco reads it": lambda: sum(
            len(image.objects) for image in CocoFile(coco, ImportReport())
        ),
        "pycocotools: COCO's file": lambda: _pycoco(coco),
    }
    if importlib.util.find_spec("globox") is None:
        say("globox is not installed, so that its rows are left out; pip install globox brings them")
    else:
        globox = importlib.import_module("globox")
        gold = globox.AnnotationSet.from_coco(coco)
        found = gold.from_results(results)
        arms["globox: COCO's file"] = lambda: globox.AnnotationSet.from_coco(coco)
        arms["globox: COCO's metrics"] = lambda: theirs.update(globox=_globox(globox, gold, found))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _, name in in_turns(arms, options.repeats):
        begun = perf_counter()
        arms[name]()
        seconds[name].append(perf_counter() - begun)
    ours = scores.points()
    differences = {
        name: max(abs(ours["eval/ap"] - ap), abs(ours["eval/ar"] - ar)) for name, (ap, ar) in theirs.items()
    }
    facts = {"seconds": seconds, "differences": differences, "num_objects": len(scores.data.truth)}
    publish(
        directory,
        "evaluate",
        facts,
        ResultTable(
            f"Seconds of {options.images:,} images with {len(scores.data.truth):,} true and "
            f"{len(scores.data.predicted):,} predicted objects of {options.classes} classes, {options.repeats} times",
            ("what", "seconds, median (quartiles)"),
            [(name, Spread.of(values).words(2)) for name, values in seconds.items()],
        ),
        *(
            f"AP and AR differ from those of {name} by at most {value:.1g}."
            for name, value in differences.items()
        ),
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


def _write_coco(directory: Path, data: DetectionData) -> tuple[Path, Path]:
    """The truth as a file of COCO's, and the predictions as one of its results.

    globox sorts images by name, and among equal scores the order decides: names are in the order of the numbers.
    """
    coco, results = directory / "coco.json", directory / "results.json"
    images = [
        {"id": number + 1, "file_name": f"{number:09d}.png", "width": _SIDE, "height": _SIDE}
        for number in range(data.num_images)
    ]
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(data.classes)]
    truth = [
        {name: value for name, value in each.items() if name != "score"} for each in _annotations(data.truth)
    ]
    coco.write_text(
        json.dumps({"images": images, "categories": categories, "annotations": truth}), encoding="utf-8"
    )
    results.write_text(json.dumps(_annotations(data.predicted)), encoding="utf-8")
    return coco, results


def _pycoco(file: Path | None = None) -> Any:
    with redirect_stdout(StringIO()):
        return importlib.import_module("pycocotools.coco").COCO(file and str(file))


def _globox(globox: Any, gold: Any, found: Any) -> tuple[float, float]:
    """AP and AR, and the other ten of COCO's twelve numbers."""
    each = globox.COCOEvaluator(ground_truths=gold, predictions=found)
    for size in ("small", "medium", "large"):
        getattr(each, f"ap_{size}")(), getattr(each, f"ar_{size}")()
    each.ar_1(), each.ar_10(), each.ap_50(), each.ap_75()
    return each.ap(), each.ar_100()


def _pycocotools(cocoeval: Any, data: DetectionData) -> tuple[float, float]:
    """AP and AR, and the other ten of COCO's twelve numbers."""
    gold = _pycoco()
    with redirect_stdout(StringIO()):
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
    return found.stats[0], found.stats[8]


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
