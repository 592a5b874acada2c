"""Points: their match against the rules applied to every possible one, their targets, their settings, their rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.dialects import POINT_LIST
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.channel_b.points import PointTask
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.channel_b.task import Convert, try_task
from swift_stage2.config import MatchingConfig
from swift_stage2.errors import SampleError
from swift_stage2.records import Target

SIZE = (300, 400)  # diagonal 500: 25 pixels are 0.05 of it
Point = tuple[int, int]
Named = list[tuple[str, Point]]
TRUE: Named = [("cat", (10, 10)), ("dog", (100, 100)), ("owl", (200, 300))]


def make_task(**settings: Any) -> PointTask:
    return PointTask(
        dialect=POINT_LIST, matching=MatchingConfig(**settings), weights=dict.fromkeys(TokenGroup, 1.0)
    )


def answer(objects: Sequence[tuple[str, Sequence[int]]]) -> str:
    return json.dumps([{"point_2d": list(point), "label": label} for label, point in objects])


def row(objects: Named) -> dict[str, Any]:
    return {
        "objects": {"ref": [label for label, _ in objects], "bbox": [list(point) for _, point in objects]}
    }


def correct(said: Named, true: Named = TRUE, **settings: Any) -> Target:
    return try_task(make_task(**settings), row(true), answer(said), SIZE)


def pairs_of(target: Target) -> list[tuple[int, int]]:
    assert target.match is not None
    return [(prediction, truth) for prediction, truth, _ in target.match.pairs]


def test_matched_points_stand_in_their_predicted_order_with_true_coordinates() -> None:
    target = correct([("owl", (203, 304)), ("ghost", (250, 20)), ("cat?", (10, 20))])
    assert target.text == answer([TRUE[2], TRUE[0], TRUE[1]])
    quality = target.quality
    assert (quality.num_predictions, quality.num_ground_truth, quality.num_pairs) == (3, 3, 2)
    assert quality.sum_iou == pytest.approx((1 - 5 / 25) + (1 - 10 / 25))
    amount, out_of = target.metrics["mean_distance"]
    assert amount == pytest.approx((5 + 10) / 500)
    assert out_of == 2


@pytest.mark.parametrize(("distance", "is_pair"), [(25, True), (26, False)])
def test_a_pair_may_be_as_far_apart_as_configured(distance: int, is_pair: bool) -> None:
    said: Named = [("dog", (10 + distance, 10))]
    near = correct(said, TRUE[:1])
    assert (near.quality.num_pairs, near.quality.num_gated) == (is_pair, not is_pair)
    assert correct(said, TRUE[:1], max_distance=0.06).quality.num_pairs == 1
    assert correct(said, TRUE[:1], max_distance=0.06, same_label=True).quality.num_pairs == 0


def test_what_is_no_point_is_dropped_with_its_reason() -> None:
    items = [("point_2d", [9, 9, 9]), ("point_2d", [-1, 2]), ("bbox_2d", [1, 2])]
    text = json.dumps([{key: place, "label": "a"} for key, place in items])
    quality = try_task(make_task(), row(TRUE), text, SIZE).quality
    assert dict(quality.dropped) == {"wrong_arity": 1, "invalid_box": 1, "unexpected_key": 1}
    assert quality.num_predictions == 0


POINTS = st.tuples(st.integers(0, 60), st.integers(0, 60))
OBJECTS = st.lists(st.tuples(st.sampled_from(["a", "b"]), POINTS), max_size=4)


@given(OBJECTS, OBJECTS)
def test_a_target_lists_the_truth_once_and_corrects_itself_no_more(said: Named, true: Named) -> None:
    target = correct(said, true)
    listed = [(found.label, found.box) for found in parse_rollout(target.text, POINT_LIST).objects]
    assert sorted(listed) == sorted(true)
    pairs = pairs_of(target)
    assert listed[: len(pairs)] == [true[truth] for _, truth in pairs], "in predicted order"
    missed = set(range(len(true))) - {truth for _, truth in pairs}
    assert listed[len(pairs) :] == [true[number] for number in sorted(missed)], "in their own order"
    again = try_task(make_task(), row(true), target.text, SIZE)
    assert again.quality.num_pairs == len(true)
    assert again.quality.sum_iou == len(true)


def test_distances_are_the_pictures_whatever_the_template_writes() -> None:
    """A wide picture: thousandths are as far apart as the pixels that they stand for."""
    task, size = make_task(), (1600, 200)
    true, said = (800.0, 100.0), (840.0, 130.0)
    in_thousandths = Convert(
        lambda lists: tuple((round(x / 1.6), round(y * 5)) for x, y in lists), (1000, 1000), size
    )
    truth = task.to_space(task.read_truth({"objects": {"ref": ["a"], "bbox": [list(true)]}}), in_thousandths)
    (point,) = in_thousandths([said])
    match = make_task(max_distance=0.1).match([("a", (point[0], point[1]))], truth)
    assert match.ious[0] == pytest.approx(1 - 50 / math.hypot(*size) / 0.1)


def test_a_row_without_an_image_has_no_diagonal() -> None:
    with pytest.raises(SampleError, match="diagonal of their image"):
        try_task(make_task(), row(TRUE), "[]")
