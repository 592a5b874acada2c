from __future__ import annotations

import math
from typing import Any

import pytest

from swift_stage2.channel_b.parsing import TrueObjects, lists_objects, read_ground_truth
from swift_stage2.errors import SampleError


def _row(ref: Any, bbox: Any, **more: Any) -> dict[str, Any]:
    return {"objects": {"ref": ref, "bbox": bbox, **more}}


def test_labels_are_stripped_and_boxes_are_numbers_in_their_own_order() -> None:
    truth = read_ground_truth(_row([" a ", "b"], [[1, 2, 3, 4], (0.5, 0, 0.5, 0)]))
    assert truth.labels == ("a", "b")
    assert truth.boxes == ((1.0, 2.0, 3.0, 4.0), (0.5, 0.0, 0.5, 0.0))
    assert all(type(number) is float for box in truth.boxes for number in box)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"a row needs objects=.*, got none"),
        ({"objects": None}, "a row needs objects="),
        ({"objects": [1]}, "a row needs objects="),
        ({"objects": {}}, "a row needs objects="),
        ({"objects": {"ref": ["a"]}}, "rows_without_objects: channel_a_only"),
        (_row(["a"], []), "num_ref=1 num_bbox=0"),
        (_row([], [[1, 2, 3, 4]]), "num_ref=0 num_bbox=1"),
        (_row(["a", "b"], [[1, 2, 3, 4]]), "num_ref=2 num_bbox=1"),
        (_row("a", [[1, 2, 3, 4]]), "must be lists"),
        (_row(["a"], 7), "must be lists"),
        (_row(["a"], {"x": 1}), "must be lists"),
        (_row([" "], [[1, 2, 3, 4]]), "every label"),
        (_row([7], [[1, 2, 3, 4]]), "every label"),
        (_row(["a"], [[1, 2, 3]]), r"four numbers x1, y1, x2, y2, got bbox=\[1, 2, 3\]"),
        (_row(["a"], [[1, 2, 3, 4, 5]]), "four numbers"),
        (_row(["a"], [[1, 2, 3, "4"]]), "four numbers"),
        (_row(["a"], [[1, 2, 3, True]]), "four numbers"),
        (_row(["a"], [[1, 2, 3, None]]), "four numbers"),
        (_row(["a"], ["1234"]), "four numbers"),
        (_row(["a"], [5]), "four numbers x1, y1, x2, y2, got bbox=5"),
        (_row(["a"], [None]), "four numbers"),
        (_row(["a"], [[-1, 2, 3, 4]]), "0 <= x1 <= x2"),
        (_row(["a"], [[3, 2, 1, 4]]), "0 <= x1 <= x2"),
        (_row(["a"], [[1, 4, 3, 2]]), "0 <= y1 <= y2"),
        (_row(["a"], [[math.nan, 2, 3, 4]]), "0 <= x1 <= x2"),
        (_row(["a"], [[1, 2, math.inf, 4]]), "0 <= x1 <= x2"),
        (_row(["a"], [[1, 2, 3, 10**400]]), "0 <= x1 <= x2"),
        (_row(["a"], [[1, 2, 3, 1e200]]), "0 <= x1 <= x2"),
        (_row(["a"], [[1, 2, 3, math.inf]]), "0 <= y1 <= y2"),
        (
            _row(["a", "b"], [[1, 2, 3, 4]] * 2, image_id=[0, 1]),
            r"first of a row's images, got image_id=\[0, 1\]",
        ),
        (_row(["a"], [[1, 2, 3, 4]], image_id=7), "got image_id=7"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_value(row: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        read_ground_truth(row)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ([1, 2, 3, 4], "a point must be two numbers x, y, got bbox="),
        ([1], "two numbers"),
        (["1", 2], "two numbers"),
        ([True, 2], "two numbers"),
        ([-1, 2], "0 <= x and 0 <= y"),
        ([1, math.nan], "0 <= x and 0 <= y"),
    ],
)
def test_what_is_no_true_point_is_refused(point: list[Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        read_ground_truth(_row(["a"], [point]), num_coordinates=2)


def test_an_image_without_objects_is_a_ground_truth() -> None:
    assert (
        read_ground_truth(_row([], [])) == read_ground_truth({"objects": {"bbox": []}}) == TrueObjects((), ())
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (_row([], []), True),
        (_row(["a"], 7), True),
        ({"objects": {}}, False),
        ({"objects": None}, False),
        ({}, False),
    ],
)
def test_only_a_list_of_boxes_says_which_objects_there_are(row: dict[str, Any], expected: bool) -> None:
    assert lists_objects(row) is expected
