"""Every metric of one set of predictions, by name; of all images, or of images that are weighed.

Names are those of an evaluation during training (``eval/f1``); a part of the objects has its own in front of them:
``class/LABEL/f1``, ``objects/2-3/recall``, ``size/small/precision``, ``iou/0.75/f1``. AP, AR and error types are
hotcoco's, of all images alike; precision, recall and F1 are counted here, also of images that are weighed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import hotcoco
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from swift_stage2.detections.objects import DetectionData, ObjectArrays
from swift_stage2.detections.overlaps import (
    THRESHOLDS,
    find_overlaps,
    match_one_to_one,
)
from swift_stage2.records import match_ratios

SIZES = ("small", "medium", "large")
OBJECT_COUNTS = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8-15": 8, "16-31": 16, "32 or more": 32}
"""Parts by the number of true objects in an image, and where each begins."""
ERRORS = {
    "Cls": "right place, wrong class",
    "Loc": "right class, IoU of 0.1 to 0.5",
    "Both": "wrong class, IoU of 0.1 to 0.5",
    "Dupe": "a further box of an object that is matched",
    "Bkg": "nothing is there",
    "Miss": "an object that no box is near",
}
"""TIDE's types."""
_FIELDS = ("num_predictions", "num_ground_truth", "num_pairs", "sum_iou")
_COCO_NAMES = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "APs": "ap_small",
    "APm": "ap_medium",
    "APl": "ap_large",
    "AR100": "ar",
    "AR1": "ar1",
    "AR10": "ar10",
    "ARs": "ar_small",
    "ARm": "ar_medium",
    "ARl": "ar_large",
}
Weights = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Objects to count apart: of each side, the number of the part that it is in. ``names`` as in metrics."""

    names: tuple[str, ...]
    predicted: NDArray[np.int64]
    true: NDArray[np.int64]
    pairs: NDArray[np.int64]
    """Places among the overlaps: those that are matched. A pair counts where its true object does."""


class Counts(NamedTuple):
    """Objects, and pairs matched at IoU 0.5."""

    predicted: int
    true: int
    matched: int


class DetectionScores:
    """The metrics of ``data``; ``answers`` are shares of answers by name, as 0 or 1 per image."""

    def __init__(self, data: DetectionData, answers: Mapping[str, NDArray[np.int64]] | None = None) -> None:
        self.data = data
        self._answers = dict(answers or {})
        self.overlaps = find_overlaps(data)
        self.pairs = match_one_to_one(self.overlaps)
        self._names, self._tallies = self._count()

    # --- all images alike ---------------------------------------------------------------------------

    @cached_property
    def _coco(self) -> hotcoco.COCOeval:
        """Numbers of images and classes from 1 on."""
        data, predicted = self.data, self.data.predicted
        gold = hotcoco.COCO.from_arrays(
            [{"id": number + 1, "width": 1, "height": 1} for number in range(data.num_images)],
            [{"id": number + 1, "name": name} for number, name in enumerate(data.classes)],
            data.truth.images + 1,
            data.truth.labels + 1,
            _corner_and_size(data.truth),
        )
        columns = (predicted.images + 1, _corner_and_size(predicted), predicted.scores, predicted.labels + 1)
        found = hotcoco.COCOeval(gold, gold.load_res(np.column_stack(columns)), "bbox")
        found.evaluate()
        found.accumulate()
        return found

    def points(self) -> dict[str, float]:
        """Every metric by name; absent where nothing was counted."""
        values = self.values(np.ones(self.data.num_images, dtype=np.int64))
        parts = {
            name: (np.flatnonzero(self.part_of_image == n) + 1).tolist()
            for n, name in enumerate(OBJECT_COUNTS)
        }
        found: dict[str, Any] = self._coco.slice_by({name: ids for name, ids in parts.items() if ids})
        for part in filter(found.get, ("_overall", *OBJECT_COUNTS)):  # hotcoco keeps no order
            prefix = "eval" if part == "_overall" else f"objects/{part}"
            values |= {
                f"{prefix}/{ours}": found[part][theirs]
                for theirs, ours in _COCO_NAMES.items()
                if found[part][theirs] >= 0
            }
        return values | self._class_precisions()

    def _class_precisions(self) -> dict[str, float]:
        """AP of each class that has true objects."""
        if not self.data.classes or not self.data.num_images:
            return {}
        curves = (self._coco.eval or {})["precision"][:, :, :, 0, -1]  # by threshold, recall and class
        means = curves.mean(axis=(0, 1)).tolist()
        return {
            f"class/{name}/ap": mean for name, mean in zip(self.data.classes, means, strict=True) if mean >= 0
        }

    def errors(self) -> dict[str, dict[str, float]]:
        """TIDE's types at IoU 0.5: how many, and the AP50 that is lost by them."""
        found = self._coco.tide_errors()
        return {
            name: {"count": found["counts"][name], "lost_ap50": found["delta_ap"][name]} for name in ERRORS
        }

    def counts(self, kind: str) -> dict[str, Counts]:
        """By part of one kind (class, objects, size)."""
        totals = self._tallies.sum(axis=0).reshape(-1, len(_FIELDS))[:, :3].astype(int).tolist()
        return {
            name.removeprefix(f"{kind}/"): Counts(*row)
            for name, row in zip(self._names, totals, strict=True)
            if name.startswith(f"{kind}/")
        }

    def matched(self) -> list[tuple[tuple[int, int, float], ...]]:
        """By image, (prediction, true object, IoU) of each pair at IoU 0.5, numbered within the image."""
        found: list[list[tuple[int, int, float]]] = [[] for _ in range(self.data.num_images)]
        begins = [
            np.searchsorted(side.images, np.arange(self.data.num_images))
            for side in (self.data.predicted, self.data.truth)
        ]
        for place in self.pairs[0].tolist():
            image = int(self.overlaps.images[place])
            prediction = int(self.overlaps.predicted[place] - begins[0][image])
            true = int(self.overlaps.true[place] - begins[1][image])
            found[image].append((prediction, true, float(self.overlaps.ious[place])))
        return [tuple(pairs) for pairs in found]

    # --- images with weights ------------------------------------------------------------------------

    def values(self, weights: Weights) -> dict[str, float]:
        """Metrics of the images as often as ``weights`` says; without those of which only ``points`` knows."""
        counts = (self._tallies.T @ weights).reshape(-1, len(_FIELDS))
        ratios = [match_ratios(**dict(zip(_FIELDS, row, strict=True))) for row in counts.tolist()]
        values = {f"eval/{name}": value for name, value in ratios[0].items()}
        for name in ("precision", "recall", "f1"):
            if name in ratios[0]:  # no threshold changes what is divided by
                at_thresholds = [each[name] for each in ratios[: len(THRESHOLDS)]]
                values[f"eval/{name}_50_95"] = sum(at_thresholds) / len(THRESHOLDS)
        for part, found in zip(self._names, ratios, strict=True):
            values |= {f"{part}/{name}": value for name, value in found.items()}
        total = int(weights.sum())
        values |= {f"eval/{name}": float(flags @ weights) / total for name, flags in self._answers.items()}
        return values

    @property
    def work(self) -> int:
        """Steps of one call of ``values``, about."""
        num_entries: int = self._tallies.nnz
        return num_entries + 1000 * len(self._names)

    # --- counts -------------------------------------------------------------------------------------

    @cached_property
    def part_of_image(self) -> NDArray[np.int64]:
        """Of each image, the place in ``OBJECT_COUNTS`` that it falls under."""
        numbers = np.bincount(self.data.truth.images, minlength=self.data.num_images)
        return np.searchsorted(list(OBJECT_COUNTS.values()), numbers, side="right") - 1

    def _count(self) -> tuple[list[str], csr_array]:
        """Names of the parts, and counts per image: columns in fours, first those of every threshold."""
        data, overlaps, at_half = self.data, self.overlaps, self.pairs[0]
        whole = np.zeros(len(data.predicted), np.int64), np.zeros(len(data.truth), np.int64)
        part_of_image = self.part_of_image
        sizes = data.predicted.sizes
        true_sizes = data.truth.sizes
        # As COCO: a box that is matched is of its object's size.
        sizes[overlaps.predicted[at_half]] = true_sizes[overlaps.true[at_half]]
        parts = [
            *(
                _Part((f"iou/{each:.2f}",), *whole, pairs)
                for each, pairs in zip(THRESHOLDS, self.pairs, strict=True)
            ),
            _Part(
                tuple(f"class/{name}" for name in data.classes),
                data.predicted.labels,
                data.truth.labels,
                at_half,
            ),
            _Part(
                tuple(f"objects/{name}" for name in OBJECT_COUNTS),
                part_of_image[data.predicted.images],
                part_of_image[data.truth.images],
                at_half,
            ),
            _Part(tuple(f"size/{name}" for name in SIZES), sizes, true_sizes, at_half),
        ]
        entries: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
        first = 0
        for part in parts:
            pairs, of_pairs = part.pairs, part.true[overlaps.true[part.pairs]]
            for place, (images, numbers, amounts) in enumerate(
                (
                    (data.predicted.images, part.predicted, np.ones(len(data.predicted))),
                    (data.truth.images, part.true, np.ones(len(data.truth))),
                    (overlaps.images[pairs], of_pairs, np.ones(len(pairs))),
                    (overlaps.images[pairs], of_pairs, overlaps.ious[pairs]),
                )
            ):
                entries.append((images, len(_FIELDS) * (first + numbers) + place, amounts))
            first += len(part.names)
        images, columns, amounts = (np.concatenate(each) for each in zip(*entries, strict=True))
        names = [name for part in parts for name in part.names]
        shape = (data.num_images, len(_FIELDS) * first)
        return names, csr_array((amounts, (images, columns)), shape=shape)


def _corner_and_size(side: ObjectArrays) -> NDArray[np.float64]:
    """Boxes as COCO has them: x, y, width, height."""
    return np.hstack([side.boxes[:, :2], side.boxes[:, 2:] - side.boxes[:, :2]])


def parts_of(names: Sequence[str], kind: str) -> list[str]:
    """The parts of one kind (class, objects, size) that metrics with these names speak of, in their order."""
    found = (name.split("/", 1)[1].rsplit("/", 1)[0] for name in names if name.startswith(f"{kind}/"))
    return list(dict.fromkeys(found))
