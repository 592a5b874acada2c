"""In which numbers a model writes its boxes: fits answers to their truth under every plausible convention. Pure.

A convention says in which numbers the answers are, the data's boxes being pixels of the stored image, or in which the
data's boxes are, the answers being what the template expects. Every one is applied to all images; a true box scores its
best IoU with an answer of its label. The expected convention stands unless another one is clearly better, image by
image, and a verdict is given only if the answers fit their own images better than other images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from swift_stage2.channel_b.matching import match_objects
from swift_stage2.dataset.conventions import (
    AnsweredImage,
    Array,
    Convention,
    Layout,
    Side,
    conventions,
    four,
    from_corners,
    in_order,
    to_corners,
)

_FEWEST_IMAGES = 10
_FEWEST_PAIRS = 12
_MARGIN = 0.05  # mean IoU by which another convention must be better
_TIE = 0.02  # mean IoU within which two conventions fit alike
_CLEARLY_BETTER = 1e-3  # levels of the two sign tests
_ABOVE_CHANCE = 1e-4  # lower: whoever is tested is the best of hundreds
_MOSTLY_FOUND = 0.8
_NUM_SWAPS = 8
_OUTSIDE, _MOST_OUTSIDE = 1.02, 0.1  # shares of an image, and of the boxes
_CLEARLY_FULLER = 1.25
_MOST_PAIRS = 1 << 20  # in memory at once
_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Fit:
    """The agreement of answers and truth under one convention."""

    convention: Convention
    num_pairs: int
    share: float
    """Pairs with an IoU above one half, of all that could be."""
    median_iou: float
    residual_px: float
    """Median distance of an edge from its true place, in pixels of the stored image."""


class CoordinateJudgement(StrEnum):
    """The outcome."""

    HEALTHY = "healthy"
    NAMED = "another convention"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class CoordinateVerdict:
    """``rivals`` fit as well as ``best``, which is the expected fit unless another one is named."""

    judgement: CoordinateJudgement
    num_images: int
    expected: Fit
    best: Fit
    rivals: tuple[Convention, ...] = ()
    reason: str = ""
    """Why nothing can be told."""


def fit_coordinates(images: Sequence[AnsweredImage]) -> CoordinateVerdict:
    """The verdict on the answers of one model on one server. Answers may be any numbers.

    Raises:
        MatchingError: a true box is not finite.
    """
    images = [image for image in images if image.answers and image.truth]
    if len(images) < _FEWEST_IMAGES:
        nothing = Fit(Convention(), 0, 0.0, 0.0, np.inf)
        reason = f"only {len(images)} images have answered boxes and true ones, {_FEWEST_IMAGES} must"
        return CoordinateVerdict(
            CoordinateJudgement.CANNOT_TELL, len(images), nothing, nothing, reason=reason
        )
    trial = _Trial(images)
    chosen, rivals = trial.choose()
    expected, best = trial.fit(0), trial.fit(chosen)
    reason = ""
    if best.num_pairs < _FEWEST_PAIRS:
        reason = f"only {best.num_pairs} answers overlap with an object of their label, {_FEWEST_PAIRS} must"
    elif best.share < _MOSTLY_FOUND and not trial.is_above_chance(chosen):
        reason = "in no numbers do the answers fit their own images clearly better than other images"
    if reason:
        return CoordinateVerdict(CoordinateJudgement.CANNOT_TELL, len(images), expected, best, reason=reason)
    judgement = CoordinateJudgement.HEALTHY if best.convention == Convention() else CoordinateJudgement.NAMED
    return CoordinateVerdict(judgement, len(images), expected, best, rivals)


def is_clearly_better(scores: Array, others: Array) -> bool:
    """By a margin on average, and on so many images that chance does not explain it."""
    return float((scores - others).mean()) >= _MARGIN and _is_mostly_above(scores, others, _CLEARLY_BETTER)


def _is_mostly_above(scores: Array, others: Array, level: float) -> bool:
    wins, losses = int((scores > others).sum()), int((scores < others).sum())
    return wins > 0 and float(binomtest(wins, wins + losses, alternative="greater").pvalue) < level


class _Trial:
    """All conventions on all images. Boxes are in shares of the image from here on."""

    def __init__(self, images: Sequence[AnsweredImage]) -> None:
        self._images = images
        found = list(conventions(images))
        self._conventions = [convention for convention, _ in found]
        sizes = np.array([sizes for _, sizes in found], dtype=np.float64)
        self._boxes = [self._both(image, sizes[:, number]) for number, image in enumerate(images)]
        known = {label.casefold() for image in images for label, _ in image.truth}
        self._labels = [
            [np.array([label.casefold() for label, _ in objects], dtype=object) for objects in both]
            for both in ((image.answers, image.truth) for image in images)
        ]
        # A label that no truth has says nothing of its box, which may be any object.
        self._is_open = [np.array([label not in known for label in answered]) for answered, _ in self._labels]
        self.scores = np.array(
            [_score(*both, self._allowed(number, number)) for number, both in enumerate(self._boxes)]
        ).T

    def _both(self, image: AnsweredImage, sizes: Array) -> tuple[Array, Array]:
        """Answers and truth under every convention, of shape (conventions, boxes, 4)."""
        written, truth = (np.array([box for _, box in boxes]) for boxes in (image.answers, image.truth))
        predicted, true = [], []
        for (side, layout), group in groupby(
            zip(self._conventions, sizes, strict=True), key=lambda each: (each[0].side, each[0].layout)
        ):
            their = np.array([size for _, size in group])[:, None, :]  # of the numbers: width and height
            if side is Side.ANSWERS:
                predicted.append(to_corners(written, layout) / four(their))
                true.append(np.broadcast_to(truth / four(image.stored), (len(their), *truth.shape)))
            else:
                answers = in_order(from_corners(written / four(image.expected), layout))
                predicted.append(np.broadcast_to(answers, (len(their), *written.shape)))
                true.append(truth / four(their[..., ::-1] if layout is Layout.Y_FIRST else their))
        # ms-swift puts the numbers of a row in order, whatever they are.
        return np.clip(np.concatenate(predicted), -_LARGEST, _LARGEST), in_order(np.concatenate(true))

    def _allowed(self, answered: int, asked: int) -> NDArray[np.bool_]:
        """Pairs of answers to one image and true objects of the same or another."""
        same = np.equal.outer(self._labels[answered][0], self._labels[asked][1]).astype(bool)
        allowed: NDArray[np.bool_] = same | self._is_open[answered][:, None]
        return allowed

    def choose(self) -> tuple[int, tuple[Convention, ...]]:
        """The convention to report, 0 being the expected one, and others that fit as well as it."""
        means = self.scores.mean(axis=1)
        predicted, true = (np.concatenate(boxes, axis=1) for boxes in zip(*self._boxes, strict=True))
        outside = [(boxes.max(axis=2) > _OUTSIDE).mean(axis=1) for boxes in (predicted, true)]
        plausible = np.maximum(*outside) <= _MOST_OUTSIDE
        plausible[0] = True
        alike = np.flatnonzero(plausible & (means >= means[plausible].max() - _TIE))
        # The same numbers on both sides may be pixels or the template's: true boxes reach across their images.
        reach = np.quantile(true[:, :, 2:], 0.95, axis=1).min(axis=1)
        alike = alike[reach[alike] * _CLEARLY_FULLER >= reach[alike].max()]
        if not is_clearly_better(self.scores[alike[0]], self.scores[0]):
            return 0, ()
        return int(alike[0]), tuple(self._conventions[index] for index in alike[1:])

    def fit(self, index: int) -> Fit:
        """Of the pairs of answers and truth, one to one."""
        matched = [self._matched(index, number) for number in range(len(self._images))]
        ious = np.concatenate([ious for _, _, ious in matched])
        edges = [
            np.abs(predicted - true) * four(image.stored)
            for (predicted, true, _), image in zip(matched, self._images, strict=True)
        ]
        most = sum(min(len(image.answers), len(image.truth)) for image in self._images)
        if not len(ious):
            return Fit(self._conventions[index], 0, 0.0, 0.0, np.inf)
        median_iou, residual = float(np.median(ious)), float(np.median(np.concatenate(edges)))
        share = float((ious > 0.5).sum() / most)
        return Fit(self._conventions[index], len(ious), share, median_iou, residual)

    def _matched(self, index: int, number: int) -> tuple[Array, Array, Array]:
        """Pairs of boxes, and their IoUs."""
        predicted, true = in_order(self._boxes[number][0][index]), self._boxes[number][1][index]
        match = match_objects(
            predicted,
            true,
            iou_threshold=1e-9,
            top_k=8,
            unmatched_prediction_cost=1.0,
            unmatched_ground_truth_cost=1.0,
            allowed=self._allowed(number, number),
        )
        pairs = np.array(match.pairs, dtype=int).reshape(-1, 2)
        return predicted[pairs[:, 0]], true[pairs[:, 1]], np.array(match.ious)

    def is_above_chance(self, index: int) -> bool:
        """Whether answers fit their own image better than they fit the truth of others."""
        num_images = len(self._images)
        by_chance = np.zeros(num_images)
        for number, swap in product(range(num_images), range(1, _NUM_SWAPS + 1)):
            other = (number + swap) % num_images
            predicted, true = self._boxes[other][0][[index]], self._boxes[number][1][[index]]
            by_chance[number] += _score(predicted, true, self._allowed(other, number))[0] / _NUM_SWAPS
        return _is_mostly_above(self.scores[index], by_chance, _ABOVE_CHANCE)


def _score(predicted: Array, true: Array, allowed: NDArray[np.bool_]) -> Array:
    """Mean over the true boxes of the best IoU with an answer, for each convention; boxes out of order have none."""
    step = max(1, _MOST_PAIRS // allowed.size)
    starts = range(0, len(predicted), step)
    parts = [_ious(predicted[at : at + step], true[at : at + step]) for at in starts]
    return np.concatenate([np.where(allowed, ious, 0.0).max(axis=1).mean(axis=1) for ious in parts])


def _ious(predicted: Array, true: Array) -> Array:
    one, other = predicted[:, :, None, :], true[:, None, :, :]
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    shared = np.clip(high - low, 0.0, None).prod(axis=-1)
    areas = [np.clip(boxes[..., 2:] - boxes[..., :2], 0.0, None).prod(axis=-1) for boxes in (one, other)]
    union = areas[0] + areas[1] - shared
    ious: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return ious
