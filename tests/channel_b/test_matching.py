"""Matching against worked cases and against the rules applied to every possible match."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from swift_stage2.channel_b.matching import MatchResult, iou_matrix, match_objects
from swift_stage2.errors import MatchingError

Boxes = list[list[float]]
SETTINGS: dict[str, Any] = {
    "iou_threshold": 0.3,
    "top_k": 10,
    "unmatched_prediction_cost": 1.0,
    "unmatched_ground_truth_cost": 1.0,
}
SHIFTED: tuple[Boxes, Boxes] = ([[0, 0, 100, 100], [50, 0, 150, 100]], [[10, 0, 110, 100], [0, 0, 100, 100]])


def best_match(predicted: ArrayLike, true: ArrayLike, **settings: Any) -> MatchResult:
    """By ``SETTINGS``, but for what a test asks otherwise."""
    return match_objects(predicted, true, **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("predicted", "true", "settings", "pairs", "gated"),
    [
        (*SHIFTED, {"iou_threshold": 0.3}, ((0, 1), (1, 0)), 0),
        (*SHIFTED, {"iou_threshold": 0.5}, ((0, 1),), 2),
        ([], [[0, 0, 1, 1]] * 3, {}, (), 0),
        # Zero areas: no IoU, and not even a division.
        ([[5, 5, 5, 5]], [[5, 5, 5, 5]], {}, (), 1),
        ([[5, 5, 5, 5]], [[5, 5, 5, 5]], {"iou_threshold": 0.0}, ((0, 0),), 0),
        # Identical boxes match in index order.
        ([[0, 0, 9, 9]] * 4, [[0, 0, 9, 9]] * 3, {}, ((0, 0), (1, 1), (2, 2)), 0),
    ],
)
def test_worked_cases(
    predicted: Boxes,
    true: Boxes,
    settings: dict[str, Any],
    pairs: tuple[tuple[int, int], ...],
    gated: int,
) -> None:
    match = best_match(predicted, true, **settings)
    assert (match.pairs, match.gated) == (pairs, gated)


def test_among_equal_totals_more_pairs_win() -> None:
    # Either one pair of IoU 1, or two of 1/2 that together save as much.
    halves: dict[str, Any] = {"unmatched_prediction_cost": 0.5, "unmatched_ground_truth_cost": 0.5}
    for height, pairs in ((5.0, ((0, 1), (1, 0))), (4.9999, ((0, 0),))):
        true = [[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, height]]
        assert best_match([[0, 0, 10, 10], [0, 0, 10, 20]], true, **halves).pairs == pairs


def test_costs_that_dwarf_the_ious_do_not_cost_precision() -> None:
    settings: dict[str, Any] = {"unmatched_prediction_cost": 1e18, "unmatched_ground_truth_cost": 1e18}
    assert best_match(*SHIFTED, **settings).pairs == ((0, 1), (1, 0))


def test_a_lattice_of_ties_goes_to_the_lower_indices() -> None:
    # Every prediction lies half on one truth and half on the next: as many perfect matchings as there are truths.
    true = [[10.0 * n, 0.0, 10.0 * n + 10, 10.0] for n in range(20)]
    predicted = [[10.0 * n + 5, 0.0, 10.0 * n + 15, 10.0] for n in range(19)]
    assert best_match(predicted, true).pairs == tuple((n, n) for n in range(19))


def test_500_boxes_cost_the_optimum() -> None:
    rng = np.random.default_rng(3)
    corners = rng.integers(0, 100, (2, 500, 2))
    predicted, true = np.concatenate([corners, corners + rng.integers(100, 300, (2, 500, 2))], axis=2)
    match = best_match(predicted, true, top_k=500)
    ious = iou_matrix(predicted, true)
    gains = np.where(ious >= 0.3, 1.0 + ious, 0.0)
    rows, columns = linear_sum_assignment(gains, maximize=True)
    assert sum(1.0 + value for value in match.ious) == pytest.approx(gains[rows, columns].sum(), abs=1e-8)


@pytest.mark.parametrize("seed", range(8))
def test_every_rule_against_every_possible_match(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        check_against_all_matches(rng, rng.randint(0, 4), rng.randint(0, 4))


@pytest.mark.parametrize("seed", range(6))
def test_every_rule_on_six_by_six(seed: int) -> None:
    check_against_all_matches(random.Random(seed), 6, 6)


def check_against_all_matches(rng: random.Random, *counts: int) -> None:
    """Small grids and repeated shapes make ties."""
    grid = rng.choice([2, 3, 4, 10, 1000])
    shapes = [ordered([rng.randint(0, grid) for _ in range(4)]) for _ in range(rng.choice([2, 3, 20]))]
    predicted, true = ([rng.choice(shapes) for _ in range(count)] for count in counts)
    settings: dict[str, Any] = {
        "iou_threshold": rng.choice([0.0, 0.1, 0.3, 1 / 3, 0.5]),
        "top_k": rng.choice([1, 2, 3, 10]),
        "unmatched_prediction_cost": rng.choice([0.0, 0.25, 0.3, 0.5, 1.0, 50.0]),
        "unmatched_ground_truth_cost": rng.choice([0.0, 0.1, 0.25, 0.5, 1.0]),
    }
    allowed = [[rng.random() < 0.6 for _ in true] for _ in predicted] if rng.random() < 0.3 else None
    mask = None if allowed is None else np.array(allowed, dtype=bool).reshape(len(predicted), len(true))
    match = best_match(predicted, true, allowed=mask, **settings)
    note = (predicted, true, settings, allowed)
    best, gated, feasible = best_of_all(predicted, true, allowed, **settings)
    assert (len(match.pairs), match.gated) == (len(best), gated), note
    alone = set(range(len(predicted))).difference(prediction for prediction, _ in match.pairs)
    assert match.duplicates == sum(bool(feasible[prediction]) for prediction in alone), note
    assert match.ious == pytest.approx([iou(predicted[p], true[t]) for p, t in match.pairs])
    assert sum(match.ious) == pytest.approx(sum(iou(predicted[p], true[t]) for p, t in best), abs=1e-9), note


def best_of_all(
    predicted: Boxes,
    true: Boxes,
    allowed: list[list[bool]] | None,
    *,
    iou_threshold: float,
    top_k: int,
    unmatched_prediction_cost: float,
    unmatched_ground_truth_cost: float,
) -> tuple[tuple[tuple[int, int], ...], int, list[dict[int, float]]]:
    """The winner among all matches, how many candidates are gated, what each may have: straight from the rules."""
    feasible: list[dict[int, float]] = []
    gated = 0
    for p, box in enumerate(predicted):
        truths = [t for t in range(len(true)) if allowed is None or allowed[p][t]]
        kept = sorted(truths, key=lambda t, box=box: (-iou(box, true[t]), t))[:top_k]  # type: ignore[misc]
        gated += sum(iou(box, true[t]) < iou_threshold for t in kept)
        costs = {t: 1.0 - iou(box, true[t]) for t in kept if iou(box, true[t]) >= iou_threshold}
        saved = unmatched_prediction_cost + unmatched_ground_truth_cost
        feasible.append({t: cost for t, cost in costs.items() if cost <= saved})
    matches: list[tuple[float, int, tuple[tuple[int, int], ...]]] = []

    def extend(p: int, pairs: tuple[tuple[int, int], ...], cost: float) -> None:
        if p == len(predicted):
            unmatched = (len(predicted) - len(pairs)) * unmatched_prediction_cost
            unmatched += (len(true) - len(pairs)) * unmatched_ground_truth_cost
            matches.append((cost + unmatched, -len(pairs), pairs))
            return
        extend(p + 1, pairs, cost)
        for t, pair_cost in feasible[p].items():
            if all(t != taken for _, taken in pairs):
                extend(p + 1, (*pairs, (p, t)), cost + pair_cost)

    extend(0, (), 0.0)
    least = min(total for total, _, _ in matches)
    winner = min((count, pairs) for total, count, pairs in matches if total <= least + 1e-9)[1]
    return winner, gated, feasible


def iou(left: Sequence[float], right: Sequence[float]) -> float:
    width = max(0.0, min(left[2], right[2]) - max(left[0], right[0]))
    height = max(0.0, min(left[3], right[3]) - max(left[1], right[1]))
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (left, right)) - width * height
    return width * height / union if union > 0 else 0.0


def ordered(box: Sequence[float]) -> list[float]:
    return [min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])]


@pytest.mark.parametrize("box", [[3, 2, 1, 4], [1, 4, 3, 2], [0, 0, np.nan, 1], [0, 0, np.inf, 1]])
def test_boxes_that_cannot_be_matched(box: list[float]) -> None:
    with pytest.raises(MatchingError, match=r"predicted_boxes\[1\]="):
        best_match([[0, 0, 1, 1], box], [[0, 0, 1, 1]])
