"""Every metric of one set of predictions, by name; of precision, recall and F1 also of images drawn again.

Names are those of an evaluation during training (``eval/f1``); a part of the objects has its own in front of them:
``class/LABEL/f1``, ``objects/2-3/recall``, ``aspect/2:1 to 4:1/f1``. AP, AR and error types are hotcoco's; precision,
recall and F1 are counted here, of pairs of one class that are matched one to one as in training (``channel_b.matching``
with ``same_label`` and its default costs). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import hotcoco
import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

from swift_stage2.channel_b.matching import assign, iou_matrix
from swift_stage2.channel_b.parsing import TrueObjects
from swift_stage2.config import MatchingConfig
from swift_stage2.data.counted_scores import RATIOS, CountedScores, Kind, Numbers, Reals
from swift_stage2.data.prediction import Prediction
from swift_stage2.records import match_ratios

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's: 0.5, 0.55, … 0.95."""
OBJECT_COUNTS = {"0": 0, "1": 1, "2-3": 2, "4-7": 4, "8-15": 8, "16-31": 16, "32 or more": 32}
"""Parts by the number of true objects in an image, and where each begins."""
ASPECTS = ("beyond 1:4", "1:4 to 1:2", "1:2 to 2:1", "2:1 to 4:1", "beyond 4:1")
"""Parts by width : height of a box. A pair counts where the true object does, as often as predicted and as true."""
ERRORS = {
    "Cls": "right place, wrong class",
    "Loc": "right class, IoU of 0.1 to 0.5",
    "Both": "wrong class, IoU of 0.1 to 0.5",
    "Dupe": "a further box of an object that is matched",
    "Bkg": "nothing is there",
    "Miss": "an object that no box is near",
}
"""TIDE's types."""
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
_COSTS = MatchingConfig()
_NUM_SCORE_BINS = 10
_CHANCE = 0.05


@dataclass(frozen=True, slots=True)
class ObjectArrays:
    """One entry per object."""

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Numbers of classes."""
    boxes: NDArray[np.float64]
    """Shape (num_objects, 4): x1, y1, x2, y2 in pixels; or (num_objects, 2): x, y of points."""
    scores: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, slots=True)
class DetectionData:
    """Truth and predictions of the same images. ``classes`` are all labels that either names."""

    num_images: int
    classes: tuple[str, ...]
    truth: ObjectArrays
    predicted: ObjectArrays
    has_scores: bool = False
    """False if all that is predicted counts as 1."""

    def parts_by_number(self) -> Numbers:
        """Of every image, the number of its part in ``OBJECT_COUNTS``."""
        numbers = np.bincount(self.truth.images, minlength=self.num_images)
        parts: Numbers = np.searchsorted(list(OBJECT_COUNTS.values()), numbers, side="right") - 1
        return parts

    def kinds(self) -> dict[str, Kind]:
        """Divisions of the objects, whatever they are."""
        predicted, true, by_number = self.predicted, self.truth, self.parts_by_number()
        return {
            "eval": ([""], np.zeros_like(predicted.images), np.zeros_like(true.images)),
            "class": (self.classes, predicted.labels, true.labels),
            "objects": (OBJECT_COUNTS, by_number[predicted.images], by_number[true.images]),
        }

    def begins(self) -> Numbers:
        """Of predictions and of truth, where each image's objects begin, and where the last one's end."""
        ends = np.arange(self.num_images + 1)
        return np.stack([np.searchsorted(side.images, ends) for side in (self.predicted, self.truth)])


_Side = Sequence[tuple[Sequence[str], Sequence[Sequence[float]], Sequence[float] | None]]
"""Per image its labels, boxes and scores."""


def detection_data(
    truths: Sequence[TrueObjects], predictions: Sequence[Prediction | None], num_coordinates: int = 4
) -> DetectionData:
    """Truth and prediction of each row; one without a prediction has predicted nothing. Without scores all are 1."""
    true: _Side = [(each.labels, each.boxes, None) for each in truths]
    said: _Side = [
        (each.objects.ref, each.objects.bbox, each.scores) if each else ((), (), None) for each in predictions
    ]
    classes = tuple(
        sorted({label.strip() for side in (true, said) for labels, _, _ in side for label in labels})
    )
    numbers = {label: number for number, label in enumerate(classes)}
    there, predicted = (_arrays(side, numbers, num_coordinates) for side in (true, said))
    has_scores = any(each is not None and each.scores is not None for each in predictions)
    return DetectionData(len(truths), classes, there, predicted, has_scores)


def _arrays(side: _Side, numbers: Mapping[str, int], num_coordinates: int) -> ObjectArrays:
    weights = [[1.0] * len(boxes) if scores is None else scores for _, boxes, scores in side]
    return ObjectArrays(
        np.repeat(np.arange(len(side)), [len(boxes) for _, boxes, _ in side]),
        np.array([numbers[label.strip()] for labels, _, _ in side for label in labels], dtype=np.int64),
        np.array([box for _, boxes, _ in side for box in boxes], dtype=np.float64).reshape(
            -1, num_coordinates
        ),
        np.array([score for scores in weights for score in scores], dtype=np.float64),
    )


class ScoreBin(NamedTuple):
    """Objects with ``low <= score < high``; the last bin has those of 1, too."""

    low: float
    high: float
    objects: int
    confidence: float
    """Their mean score."""
    matched: float
    """The share that is right."""


def score_bins(scores: Reals, right: NDArray[np.bool_]) -> list[ScoreBin]:
    """Bins of one width that hold objects; none at all if a score is no probability."""
    if not ((scores >= 0) & (scores <= 1)).all():
        return []
    places = np.minimum((scores * _NUM_SCORE_BINS).astype(np.int64), _NUM_SCORE_BINS - 1)
    bins = []
    for place in np.unique(places).tolist():
        own = places == place
        bounds = place / _NUM_SCORE_BINS, (place + 1) / _NUM_SCORE_BINS
        bins.append(ScoreBin(*bounds, int(own.sum()), float(scores[own].mean()), float(right[own].mean())))
    return bins


def calibration_error(bins: Sequence[ScoreBin]) -> float:
    """ECE: how far confidence and the share that is right are apart, mean over objects. ``bins`` hold some."""
    gaps = sum(each.objects * abs(each.confidence - each.matched) for each in bins)
    return gaps / sum(each.objects for each in bins)


class DetectionScores(CountedScores):
    """The metrics of ``data``; ``answers`` are shares of answers by name, as 0 or 1 per image."""

    def __init__(self, data: DetectionData, answers: Mapping[str, Numbers] | None = None) -> None:
        self.data = data
        self._answers = dict(answers or {})
        self.matched, self._found, self.num_matched = match_images(data)
        super().__init__(
            (data.predicted.images, data.truth.images), data.num_images, self._kinds(), iou=self._found[1]
        )

    def points(self) -> dict[str, float]:
        """Every metric by name; absent where nothing was counted."""
        values: dict[str, float] = {}
        sums = self.sums([iou for pairs in self.matched for *_, iou in pairs])
        for part, total, sum_iou in zip(self.parts, self.totals(), sums, strict=True):
            ratios = match_ratios(
                num_predictions=total.predicted,
                num_ground_truth=total.true,
                num_pairs=total.matched,
                sum_iou=sum_iou,
            )
            values |= {f"{part}/{name}": value for name, value in ratios.items()}
        for name in RATIOS:
            if (matched := values.get(f"eval/{name}")) is not None:  # no threshold changes what is divided by
                share = self.num_matched.mean() / self.num_matched[0] if matched else 0.0
                values[f"eval/{name}_50_95"] = matched * share
        values |= {f"eval/{name}": float(flags.mean()) for name, flags in self._answers.items()}
        found = self._coco.slice_by({})["_overall"]
        values |= {
            f"eval/{ours}": found[theirs] for theirs, ours in _COCO_NAMES.items() if found[theirs] >= 0
        }
        if self.data.has_scores and (plain := self.ap_with(np.ones(len(self.data.predicted)))) is not None:
            values["eval/ap_without_scores"] = plain
        if self.calibration:
            values["eval/ece"] = calibration_error(self.calibration)
        curves: Any = (self._coco.eval or {})["precision"][:, :, :, 0, -1]  # by threshold, recall and class
        precisions = zip(self.data.classes, curves.mean(axis=(0, 1)).tolist(), strict=True)
        return values | {f"class/{name}/ap": mean for name, mean in precisions if mean >= 0}

    def ap_with(self, scores: Reals) -> float | None:
        """AP if the predicted objects had these scores; None where no class has a true object."""
        predicted = replace(self.data.predicted, scores=scores)
        found = _coco_of(replace(self.data, predicted=predicted)).slice_by({})["_overall"]["AP"]
        return found if found >= 0 else None

    @cached_property
    def calibration(self) -> list[ScoreBin]:
        """Of objects with a score of about p a share of about p should be right, matched at IoU 0.5.

        Nothing without scores, or where one is no probability.
        """
        return score_bins(self.data.predicted.scores, self._right) if self.data.has_scores else []

    @property
    def rank_right_first(self) -> bool:
        """True if matched objects have higher scores than others, beyond chance (Mann-Whitney's U, one-sided, 5 %)."""
        right, false = (self.data.predicted.scores[which] for which in (self._right, ~self._right))
        if not (len(right) and len(false)):
            return False
        return bool(mannwhitneyu(right, false, alternative="greater").pvalue < _CHANCE)

    @property
    def _right(self) -> NDArray[np.bool_]:
        right = np.zeros(len(self.data.predicted), dtype=bool)
        right[self._found[0]] = True
        return right

    def errors(self) -> dict[str, dict[str, float]]:
        """TIDE's types at IoU 0.5: how many, and the AP50 that is lost by them."""
        found = self._coco.tide_errors()
        return {
            name: {"count": found["counts"][name], "lost_ap50": found["delta_ap"][name]} for name in ERRORS
        }

    def errors_by_number(self) -> dict[str, dict[str, int]]:
        """The same numbers by ``OBJECT_COUNTS``, beside how many ``images`` those are; they add up to the whole's."""
        parts, found = self.data.parts_by_number(), dict[str, dict[str, int]]()
        for number in np.unique(parts).tolist():  # not those without images: hotcoco takes none for all
            images = np.flatnonzero(parts == number) + 1
            of_part = hotcoco.COCOeval(self._coco.coco_gt, self._coco.coco_dt, "bbox")
            of_part.params.img_ids = images.tolist()
            of_part.evaluate()
            found[list(OBJECT_COUNTS)[number]] = {"images": len(images), **of_part.tide_errors()["counts"]}
        return found

    @cached_property
    def _coco(self) -> hotcoco.COCOeval:
        return _coco_of(self.data)

    def _kinds(self) -> dict[str, Kind]:
        predicted, true = self.data.predicted, self.data.truth
        aspects, true_aspects = _aspects(predicted.boxes), _aspects(true.boxes)
        predictions, found = self._found
        aspects[predictions] = true_aspects[found]
        return {**self.data.kinds(), "aspect": (ASPECTS, aspects, true_aspects)}


Pairs = tuple[tuple[int, int, float], ...]
"""Of one image prediction, true object and IoU, numbered within the image."""


def match_images(data: DetectionData) -> tuple[list[Pairs], Numbers, Numbers]:
    """The pairs of one class at IoU 0.5 by image, the predictions and the true objects in them by their places in
    ``data``, and how many pairs there are at each threshold."""
    most = _COSTS.unmatched_prediction_cost + _COSTS.unmatched_ground_truth_cost - 1
    begins = data.begins()
    matched, found, numbers = list[Pairs](), list[Numbers](), np.zeros(len(THRESHOLDS), dtype=np.int64)
    for image in range(data.num_images):
        said, true = (slice(*each[image : image + 2]) for each in begins)
        ious = iou_matrix(data.predicted.boxes[said], data.truth.boxes[true])
        ious[np.not_equal.outer(data.predicted.labels[said], data.truth.labels[true])] = 0
        pairs = []
        for least in THRESHOLDS:
            rows, columns = np.nonzero(ious >= least)
            pairs.append(assign(rows, columns, most + ious[rows, columns]))
        matched.append(tuple((one, other, float(ious[one, other])) for one, other in pairs[0]))
        found += [begins[:, image] + pair for pair in pairs[0]]
        numbers += list(map(len, pairs))
    return matched, np.array(found, dtype=np.int64).reshape(-1, 2).T, numbers


def _coco_of(data: DetectionData) -> hotcoco.COCOeval:
    """Accumulated; numbers of images and classes from 1 on."""
    predicted = data.predicted
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


def _aspects(boxes: Reals) -> Numbers:
    """Of every box the number of its part in ``ASPECTS``; flat ones go to the ends, a dot to the middle."""
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    above = [width >= height / 4, width >= height / 2, width > 2 * height, width > 4 * height]
    part: Numbers = np.sum(above, axis=0, dtype=np.int64)
    return part


def _corner_and_size(side: ObjectArrays) -> Reals:
    """Boxes as COCO has them: x, y, width, height."""
    return np.hstack([side.boxes[:, :2], side.boxes[:, 2:] - side.boxes[:, :2]])
