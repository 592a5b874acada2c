"""Every metric of one set of predictions, by name; of precision, recall and F1 also of images drawn again.

Names are those of an evaluation during training (``eval/f1``); a part of the objects has its own in front of them:
``class/LABEL/f1``, ``objects/2-3/recall``, ``size/small/precision``. AP, AR and error types are hotcoco's; precision,
recall and F1 are counted here, of pairs of one class that are matched one to one as in training (``channel_b.matching``
with ``same_label`` and its default costs). Pure.
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

from swift_stage2.channel_b.matching import assign, paired_ious
from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.config import MatchingConfig
from swift_stage2.data.prediction import Prediction
from swift_stage2.records import match_ratios

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's: 0.5, 0.55, … 0.95."""
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
RATIOS = ("precision", "recall", "f1")
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
_SMALL, _MEDIUM = 32.0**2, 96.0**2  # square pixels, as COCO has them
_COSTS = MatchingConfig()
_DRAWS_AT_ONCE = 50
Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ObjectArrays:
    """One entry per object."""

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Numbers of classes."""
    boxes: NDArray[np.float64]
    """Shape (num_objects, 4): x1, y1, x2, y2 in pixels."""
    scores: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """COCO's class of each box's area: 0 small, 1 medium, 2 large."""
        areas = np.prod(self.boxes[:, 2:] - self.boxes[:, :2], axis=1)
        sizes: NDArray[np.int64] = np.searchsorted([_SMALL, _MEDIUM], areas, side="right")
        return sizes


@dataclass(frozen=True, slots=True)
class DetectionData:
    """Truth and predictions of the same images. ``classes`` are all labels that either names."""

    num_images: int
    classes: tuple[str, ...]
    truth: ObjectArrays
    predicted: ObjectArrays


def detection_data(truths: Sequence[TrueObjects], predictions: Sequence[Prediction | None]) -> DetectionData:
    """Truth and prediction of each row; one without a prediction has predicted nothing. Without scores all are 1."""
    found = [
        (each.objects.ref, each.objects.bbox, each.scores) if each else ((), (), ()) for each in predictions
    ]
    said = [[label.strip() for label in labels] for labels, _, _ in found]
    classes = tuple(
        sorted({label for labels in (*said, *(each.labels for each in truths)) for label in labels})
    )
    numbers = {label: number for number, label in enumerate(classes)}

    def arrays(
        labels: Sequence[Sequence[str]],
        boxes: Sequence[Sequence[Sequence[float]]],
        scores: Sequence[Sequence[float]],
    ) -> ObjectArrays:
        return ObjectArrays(
            np.repeat(np.arange(len(boxes)), [len(each) for each in boxes]),
            np.array([numbers[label] for each in labels for label in each], dtype=np.int64),
            np.array([box for each in boxes for box in each], dtype=np.float64).reshape(-1, 4),
            np.array([score for each in scores for score in each], dtype=np.float64),
        )

    given = [[1.0] * len(boxes) if scores is None else scores for _, boxes, scores in found]
    truth = arrays(
        [each.labels for each in truths],
        [each.boxes for each in truths],
        [[1.0] * len(each) for each in truths],
    )
    return DetectionData(len(truths), classes, truth, arrays(said, [boxes for _, boxes, _ in found], given))


class Counts(NamedTuple):
    """Objects, and pairs matched at IoU 0.5."""

    predicted: int
    true: int
    matched: int


class Bounds(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


class Overlaps(NamedTuple):
    """Pairs of one image and class with an IoU of at least the lowest threshold, sorted by prediction, then truth."""

    predicted: Numbers
    true: Numbers
    ious: Reals
    images: Numbers


class DetectionScores:
    """The metrics of ``data``; ``answers`` are shares of answers by name, as 0 or 1 per image."""

    def __init__(self, data: DetectionData, answers: Mapping[str, Numbers] | None = None) -> None:
        self.data = data
        self._answers = dict(answers or {})
        self.overlaps = find_overlaps(data)
        self.pairs = match_one_to_one(self.overlaps)
        self.parts, self._tallies, self._sums = self._count()

    def points(self) -> dict[str, float]:
        """Every metric by name; absent where nothing was counted."""
        values: dict[str, float] = {}
        for part, total, sum_iou in zip(self.parts, self._totals(), self._sums.tolist(), strict=True):
            ratios = match_ratios(
                num_predictions=total.predicted,
                num_ground_truth=total.true,
                num_pairs=total.matched,
                sum_iou=sum_iou,
            )
            values |= {f"{part}/{name}": value for name, value in ratios.items()}
        mean_matched = sum(map(len, self.pairs)) / len(THRESHOLDS)
        for name in RATIOS:
            if (matched := values.get(f"eval/{name}")) is not None:  # no threshold changes what is divided by
                share = mean_matched / len(self.pairs[0]) if matched else 0.0
                values[f"eval/{name}_50_95"] = matched * share
        values |= {f"eval/{name}": float(flags.mean()) for name, flags in self._answers.items()}
        found = self._coco.slice_by({})["_overall"]
        values |= {
            f"eval/{ours}": found[theirs] for theirs, ours in _COCO_NAMES.items() if found[theirs] >= 0
        }
        return values | self._class_precisions()

    def errors(self) -> dict[str, dict[str, float]]:
        """TIDE's types at IoU 0.5: how many, and the AP50 that is lost by them."""
        found = self._coco.tide_errors()
        return {
            name: {"count": found["counts"][name], "lost_ap50": found["delta_ap"][name]} for name in ERRORS
        }

    def counts(self, kind: str) -> dict[str, Counts]:
        """By part of one kind (class, objects, size)."""
        found = zip(self.parts, self._totals(), strict=True)
        return {part.removeprefix(f"{kind}/"): total for part, total in found if part.startswith(f"{kind}/")}

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

    def intervals(self, num_draws: int, minus: DetectionScores | None = None) -> dict[str, Bounds]:
        """Of precision, recall and F1 of every part, by the bootstrap over images: drawn again, as many as there are.

        With ``minus``: of the differences from another set's, image by image, on the same draws; the draws are always
        the same. hotcoco's own comparison keeps an image that was drawn twice once, which makes its intervals a quarter
        too narrow.
        """
        generator, drawn = np.random.default_rng(0), list[dict[str, Reals]]()
        for first in range(0, num_draws, _DRAWS_AT_ONCE):
            chosen = [
                generator.integers(self.data.num_images, size=self.data.num_images)
                for _ in range(min(_DRAWS_AT_ONCE, num_draws - first))
            ]
            weights = np.stack([np.bincount(each, minlength=self.data.num_images) for each in chosen], axis=1)
            values, others = self._weighted(weights), minus._weighted(weights) if minus else {}
            drawn.append(
                {n: values[n] - others[n] if minus else values[n] for n in values if not minus or n in others}
            )
        found = {name: np.concatenate([each[name] for each in drawn]) for name in (drawn[0] if drawn else ())}
        known = {name: values[np.isfinite(values)] for name, values in found.items()}
        return {
            name: Bounds(*np.quantile(values, (0.025, 0.975)).tolist())
            for name, values in known.items()
            if len(values)
        }

    def _weighted(self, weights: Numbers) -> dict[str, Reals]:
        """Precision, recall and F1 of images as often as a column of ``weights`` says; an entry per column."""
        predicted, true, matched = (self._tallies.T @ weights).reshape(3, len(self.parts), -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = matched / predicted, matched / true, 2 * matched / (predicted + true)
        by_name = zip(RATIOS, ratios, strict=True)
        return {f"{part}/{name}": of[n] for name, of in by_name for n, part in enumerate(self.parts)}

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

    def _class_precisions(self) -> dict[str, float]:
        """AP of each class that has true objects."""
        if not self.data.classes or not self.data.num_images:
            return {}
        curves: Any = (self._coco.eval or {})["precision"][:, :, :, 0, -1]  # by threshold, recall and class
        means = curves.mean(axis=(0, 1)).tolist()
        return {
            f"class/{name}/ap": mean for name, mean in zip(self.data.classes, means, strict=True) if mean >= 0
        }

    def _totals(self) -> list[Counts]:
        return [Counts(*each) for each in self._tallies.sum(axis=0).reshape(3, -1).T.tolist()]

    def _count(self) -> tuple[list[str], csr_array, Reals]:
        """Names of the parts; predicted, true and matched objects per image, a column per part; sums of IoUs."""
        predicted, true, at_half = self.data.predicted, self.data.truth, self.pairs[0]
        of_predicted, of_true = self.overlaps.predicted[at_half], self.overlaps.true[at_half]
        sizes, true_sizes = predicted.sizes, true.sizes
        sizes[of_predicted] = true_sizes[of_true]  # as COCO: a box that is matched is of its object's size
        numbers = np.bincount(true.images, minlength=self.data.num_images)
        by_number = np.searchsorted(list(OBJECT_COUNTS.values()), numbers, side="right") - 1
        # Of each kind: the names of its parts, and the number of the part that each object of a side is in.
        kinds = (
            (["eval"], np.zeros_like(predicted.images), np.zeros_like(true.images)),
            ([f"class/{name}" for name in self.data.classes], predicted.labels, true.labels),
            (
                [f"objects/{name}" for name in OBJECT_COUNTS],
                by_number[predicted.images],
                by_number[true.images],
            ),
            ([f"size/{name}" for name in SIZES], sizes, true_sizes),
        )
        parts = [name for names, _, _ in kinds for name in names]
        images: list[Numbers] = []
        columns: list[Numbers] = []
        sums, first = np.zeros(len(parts)), 0
        for names, said, there in kinds:
            matched = there[of_true]  # a pair counts where its true object does
            for place, (where, part) in enumerate(
                ((predicted.images, said), (true.images, there), (true.images[of_true], matched))
            ):
                images.append(where)
                columns.append(place * len(parts) + first + part)
            np.add.at(sums, first + matched, self.overlaps.ious[at_half])
            first += len(names)
        at = np.concatenate(images), np.concatenate(columns)
        ones = np.ones(len(at[0]), dtype=np.int64)
        return parts, csr_array((ones, at), shape=(self.data.num_images, 3 * len(parts))), sums


def find_overlaps(data: DetectionData) -> Overlaps:
    """All of them; memory grows with the pairs of one image and class."""
    predicted, true = data.predicted, data.truth
    # A number per object that those of one image and class share, ascending with the image.
    keys = [side.images * max(1, len(data.classes)) + side.labels for side in (predicted, true)]
    order = np.argsort(keys[1], kind="stable")
    begins, ends = (np.searchsorted(keys[1][order], keys[0], side) for side in ("left", "right"))
    counts = ends - begins
    left = np.repeat(np.arange(len(predicted)), counts)
    right = order[np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[left]]
    ious = paired_ious(predicted.boxes[left], true.boxes[right])
    kept = ious >= THRESHOLDS[0]
    left, right, ious = left[kept], right[kept], ious[kept]
    return Overlaps(left, right, ious, predicted.images[left])


def match_one_to_one(overlaps: Overlaps) -> list[Numbers]:
    """Per threshold the places of the pairs that are matched, in order."""
    gains = _COSTS.unmatched_prediction_cost + _COSTS.unmatched_ground_truth_cost - (1 - overlaps.ious)
    known: dict[bytes, Numbers] = {}  # thresholds often leave an image the same pairs
    return [_assign(overlaps, gains, np.flatnonzero(overlaps.ious >= each), known) for each in THRESHOLDS]


def _assign(overlaps: Overlaps, gains: Reals, places: Numbers, known: dict[bytes, Numbers]) -> Numbers:
    rows, columns = overlaps.predicted[places], overlaps.true[places]
    alone = (np.bincount(rows)[rows] == 1) & (np.bincount(columns)[columns] == 1)
    contested = places[~alone]
    found = [places[alone]]
    borders = np.flatnonzero(np.diff(overlaps.images[contested])) + 1
    for group in np.split(contested, borders) if len(contested) else ():
        key = group.tobytes()
        if key not in known:
            rows, columns = overlaps.predicted[group], overlaps.true[group]
            rows, columns = rows - rows.min(), columns - columns.min()
            pairs = set(assign(rows, columns, gains[group]))
            both = zip(rows.tolist(), columns.tolist(), strict=True)
            known[key] = group[[pair in pairs for pair in both]]
        found.append(known[key])
    return np.sort(np.concatenate(found))


def _corner_and_size(side: ObjectArrays) -> Reals:
    """Boxes as COCO has them: x, y, width, height."""
    return np.hstack([side.boxes[:, :2], side.boxes[:, 2:] - side.boxes[:, :2]])
