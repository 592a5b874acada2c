"""Data sets and predictions for the tests: drawn at random with true objects found, missed, doubled and invented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swift_stage2.data.scores import DetectionData, ObjectArrays
from swift_stage2.demo.scenes import grounding_row

SIDE = 400
Boxes = Sequence[tuple[str, Sequence[float]]]


def random_data(
    seed: int, *, num_images: int, num_classes: int, per_class: float = 0.7, ties: bool = False
) -> DetectionData:
    """Boxes of all sizes, in whole pixels, so that some IoU are exactly a threshold; about ``per_class`` of each class
    in every image. With ``ties`` every second class has four scores only."""
    generator = np.random.default_rng(seed)
    counts = generator.poisson(per_class, (num_images, num_classes))
    images, labels = (np.repeat(numbers.ravel(), counts.ravel()) for numbers in np.indices(counts.shape))
    corners = generator.integers(0, SIDE // 2, (len(images), 2))
    sizes = generator.choice([12, 40, 150], (len(images), 1)) + generator.integers(0, 20, (len(images), 2))
    boxes = np.hstack([corners, corners + sizes]).astype(float)
    copies = np.repeat(np.arange(len(images)), generator.choice(4, len(images), p=[0.15, 0.6, 0.15, 0.1]))
    noise = generator.choice([0, 1, 6], (len(copies), 1)) * generator.integers(-2, 3, (len(copies), 4))
    found = boxes[copies] + noise
    found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
    found_labels = np.where(
        generator.random(len(copies)) < 0.1, (labels[copies] + 1) % num_classes, labels[copies]
    )
    scores = generator.permutation(len(copies)) / len(copies)
    if ties:
        scores = np.where(found_labels % 2, np.ceil(4 * scores) / 4, scores)
    return DetectionData(
        num_images,
        tuple(f"c{number:04d}" for number in range(num_classes)),
        ObjectArrays(images, labels, boxes, np.ones(len(images))),
        ObjectArrays(images[copies], found_labels, found, scores),
    )


def hand_made(truth: Sequence[Boxes], predicted: Sequence[Boxes]) -> DetectionData:
    """Of images written out; the scores fall from object to object."""
    classes = tuple(sorted({label for image in (*truth, *predicted) for label, _ in image}))

    def arrays(images: Sequence[Boxes]) -> ObjectArrays:
        flat = [(number, label, box) for number, image in enumerate(images) for label, box in image]
        return ObjectArrays(
            np.array([number for number, _, _ in flat], dtype=np.int64),
            np.array([classes.index(label) for _, label, _ in flat], dtype=np.int64),
            np.array([box for _, _, box in flat], dtype=float).reshape(-1, 4),
            1.0 / np.arange(1, len(flat) + 1),
        )

    return DetectionData(len(truth), classes, arrays(truth), arrays(predicted))


def write_rows(path: Path, images: Sequence[tuple[str, Boxes]]) -> Path:
    """A data set in ms-swift's format; the images need not exist."""
    rows = [
        grounding_row([(label, tuple(box)) for label, box in objects], image) for image, objects in images
    ]  # type: ignore[misc]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def line(image: str, objects: Boxes, **more: Any) -> dict[str, Any]:
    """One prediction."""
    lists = {"ref": [label for label, _ in objects], "bbox": [list(box) for _, box in objects]}
    return {"image": image, "width": SIDE, "height": SIDE, "objects": lists, **more}


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path
