"""Turns predicted boxes and true boxes into the match between them.

Each prediction keeps its best ``top_k`` truths; of those, pairs below the IoU threshold are infeasible
before the assignment, which then is optimal over what is left. A pure function of its arguments, ties
included. Called by the task.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from swift_stage2.errors import MatchingError

TOLERANCE = 1e-9
"""The most by which the total gain of an assignment may be below the best one."""

# Areas of larger boxes, and sums of areas, would leave the range of float64.
MAX_COORDINATE = 1e150


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Which prediction is which truth. All indices refer to the order in which the boxes were given."""

    pairs: tuple[tuple[int, int], ...]  # (prediction, truth), sorted by prediction
    gated: int  # candidates below the threshold
    ious: tuple[float, ...] = ()  # of the pairs, in their order; or what stood in the IoU's place
    duplicates: int = 0  # predictions without a partner that could have had one: it has another


def match_objects(
    predicted_boxes: ArrayLike,
    true_boxes: ArrayLike,
    *,
    iou_threshold: float,
    top_k: int,
    unmatched_prediction_cost: float,
    unmatched_ground_truth_cost: float,
    allowed: NDArray[np.bool_] | None = None,
) -> MatchResult:
    """The cheapest match, where a pair costs 1 − IoU and everything unmatched its own cost.

    Args:
        predicted_boxes: shape (num_predictions, 4), x1, y1, x2, y2.
        true_boxes: shape (num_truths, 4), in the same space.
        iou_threshold: pairs with a smaller IoU are infeasible and counted as gated.
        top_k: truths that each prediction considers, by IoU, ties by lower index.
        unmatched_prediction_cost: a pair dearer than both unmatched costs together is infeasible.
        unmatched_ground_truth_cost: see there.
        allowed: booleans of shape (num_predictions, num_truths); pairs outside are no candidates at all.

    Returns:
        The match of least total cost, as ``assign`` has it among equals.

    Raises:
        ValueError: boxes that are not of shape (n, 4).
        MatchingError: boxes that are not finite or not in order.
    """
    return match_by_similarity(
        iou_matrix(predicted_boxes, true_boxes),
        threshold=iou_threshold,
        top_k=top_k,
        unmatched_prediction_cost=unmatched_prediction_cost,
        unmatched_ground_truth_cost=unmatched_ground_truth_cost,
        allowed=allowed,
    )


def match_by_similarity(
    similarity: NDArray[np.float64],
    *,
    threshold: float,
    top_k: int,
    unmatched_prediction_cost: float,
    unmatched_ground_truth_cost: float,
    allowed: NDArray[np.bool_] | None = None,
) -> MatchResult:
    """The same by any measure in place of the IoU: 1 of what is alike, and at least 0 where it reaches ``threshold``.

    Args:
        similarity: shape (num_predictions, num_truths), finite.
    """
    num_predictions, num_truths = similarity.shape
    chosen = similarity >= threshold
    if allowed is None:
        num_candidates = num_predictions * min(top_k, num_truths)
    else:
        chosen &= allowed
        num_candidates = int(np.minimum(allowed.sum(axis=1), top_k).sum())
    _keep_best(chosen, similarity, top_k)
    predictions, truths = np.nonzero(chosen)
    shared = similarity[predictions, truths]
    saved = unmatched_prediction_cost + unmatched_ground_truth_cost
    feasible = 1.0 - shared <= saved
    # Once a pair saves more than all other pairs can cost, larger savings only cost precision.
    gains = min(saved, min(similarity.shape) + 1.0) - (1.0 - shared)
    predictions, truths, gains = predictions[feasible], truths[feasible], gains[feasible]
    pairs = tuple(assign(predictions, truths, gains))
    return MatchResult(
        pairs=pairs,
        gated=num_candidates - len(shared),
        ious=tuple(float(similarity[pair]) for pair in pairs),
        # The best match leaves no feasible pair of which both are free.
        duplicates=len(np.unique(predictions)) - len(pairs),
    )


def assign(
    rows: NDArray[np.int64], columns: NDArray[np.int64], gains: NDArray[np.float64]
) -> list[tuple[int, int]]:
    """The pairs (row, column), sorted by row, of the assignment with the largest total gain, ``TOLERANCE`` aside.

    ``rows[k]`` may take ``columns[k]``, which gains ``gains[k] >= 0``. A bonus, over all pairs together at most the
    tolerance, decides between equals: more pairs come first, then lower indices and pairs that do not cross, as far as
    floating point tells these apart (up to some forty that contend for each other). A pair that stands alone needs no
    solver.
    """
    alone = (np.bincount(rows)[rows] == 1) & (np.bincount(columns)[columns] == 1)
    pairs = list(zip(rows[alone].tolist(), columns[alone].tolist(), strict=True))
    if not alone.all():
        row_ids, row = np.unique(rows[~alone], return_inverse=True)
        column_ids, column = np.unique(columns[~alone], return_inverse=True)
        weights = np.zeros((len(row_ids), len(column_ids)))
        most_pairs = min(weights.shape)
        lowness = (1 - row / len(row_ids)) * (1 - column / len(column_ids))
        # The lowness of all pairs together weighs no more than one pair.
        weights[row, column] = gains[~alone] + TOLERANCE / (2 * most_pairs) * (1 + lowness / most_pairs)
        chosen = np.stack(linear_sum_assignment(weights, maximize=True))
        chosen = chosen[:, weights[chosen[0], chosen[1]] > 0]
        pairs += zip(row_ids[chosen[0]].tolist(), column_ids[chosen[1]].tolist(), strict=True)
    return sorted(pairs)


def iou_matrix(predicted_boxes: ArrayLike, true_boxes: ArrayLike) -> NDArray[np.float64]:
    """Intersection over union, shape (num_predictions, num_truths); 0 where both areas are 0.

    Raises:
        ValueError: boxes that are not of shape (n, 4).
        MatchingError: boxes that are not finite or not in order.
    """
    predicted = _check_boxes("predicted_boxes", predicted_boxes).T[:, :, None]
    true = _check_boxes("true_boxes", true_boxes).T[:, None, :]
    return _ious(predicted, true)


def _ious(predicted: NDArray[np.float64], true: NDArray[np.float64]) -> NDArray[np.float64]:
    width = np.minimum(predicted[2], true[2]) - np.maximum(predicted[0], true[0])
    height = np.minimum(predicted[3], true[3]) - np.maximum(predicted[1], true[1])
    shared: NDArray[np.float64] = np.maximum(width, 0.0, out=width)
    shared *= np.maximum(height, 0.0, out=height)
    union = _areas(predicted) + _areas(true)
    union -= shared
    np.divide(shared, union, out=shared, where=union > 0)  # where the union is 0, so is what they share
    return shared


def _areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (boxes[2] - boxes[0]) * (boxes[3] - boxes[1])
    return areas


def _keep_best(chosen: NDArray[np.bool_], ious: NDArray[np.float64], top_k: int) -> None:
    """Leaves each row of ``chosen``, in place, its ``top_k`` largest IoUs; ties go to the lower index."""
    crowded = np.flatnonzero(chosen.sum(axis=1) > top_k)
    costs = np.where(chosen[crowded], -ious[crowded], np.inf)
    best = np.argsort(costs, axis=1, kind="stable")[:, :top_k]
    chosen[crowded] = False
    chosen[crowded[:, None], best] = True


def _check_boxes(name: str, boxes: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(boxes, dtype=np.float64)
    array = array.reshape(len(array), 4)
    is_sane = (np.abs(array) <= MAX_COORDINATE).all(axis=1) & (array[:, :2] <= array[:, 2:]).all(axis=1)
    if not is_sane.all():
        index = int(np.argmin(is_sane))
        raise MatchingError(
            f"boxes must be finite with x1 <= x2 and y1 <= y2, got {name}[{index}]={array[index].tolist()}; "
            "drop or reorder it before matching"
        )
    return array
