"""The reward's terms: by hand, and the properties that a reward must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import config_of
from detection_task import make_task
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.dialects import POINT_LIST
from swift_stage2.channel_b.points import PointTask
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.channel_b.task import Task, reward_terms, try_task
from swift_stage2.checks.channel_b_parts import make_task as task_of
from swift_stage2.config import MatchingConfig
from swift_stage2.config.objective import REWARD_WEIGHTS
from swift_stage2.errors import TaskError
from swift_stage2.records import MatchQuality, Target

Box = tuple[int, int, int, int]
RANGES = {"f1": (0, 1), "iou": (0, 1), "format": (0, 1), "duplicates": (-1, 0), "misses": (-1, 0)}
BEST = {"f1": 1.0, "iou": 1.0, "format": 1.0, "duplicates": 0.0, "misses": 0.0, "total": 2.5}
POINTS = PointTask(dialect=POINT_LIST, matching=MatchingConfig(), weights=dict.fromkeys(TokenGroup, 1.0))
_sizes = st.integers(1, 6)
_place = st.tuples(st.integers(0, 8), st.integers(0, 8), _sizes, _sizes)
boxes = _place.map(lambda at: (at[0], at[1], at[0] + at[2], at[1] + at[3]))


def answer(said: Sequence[Box]) -> str:
    return json.dumps([{"bbox_2d": list(box), "label": "a"} for box in said])


def row(true: Sequence[Box]) -> dict[str, Any]:
    return {"objects": {"ref": ["a"] * len(true), "bbox": [list(box) for box in true]}}


def reward(said: Sequence[Box] | str, true: Sequence[Box], task: Task | None = None) -> Mapping[str, float]:
    text = said if isinstance(said, str) else answer(said)
    return try_task(task or make_task(), row(true), text).quality.reward


# --- properties ---------------------------------------------------------------------------------------


@given(st.lists(boxes, max_size=7), st.lists(boxes, max_size=7), st.sampled_from(["", "]", "[", "no", "[7]"]))
def test_every_term_is_in_its_range_and_nothing_beats_the_truth(
    said: list[Box], true: list[Box], spoilt: str
) -> None:
    for found in (reward(said, true), reward(spoilt, true), reward(answer(said) + spoilt, true)):
        assert found.keys() == {*RANGES, "total"}
        for name, (least, most) in RANGES.items():
            assert least <= found[name] <= most, name
        assert found["total"] <= BEST["total"]
    assert reward(true, true) == BEST


@given(st.lists(boxes, max_size=6), st.lists(boxes, max_size=6), st.randoms())
def test_no_order_changes_anything(said: list[Box], true: list[Box], random: Any) -> None:
    other = reward(random.sample(said, len(said)), random.sample(true, len(true)))
    assert dict(other) == pytest.approx(dict(reward(said, true)), abs=1e-8)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Box], list[Box], list[Box]]:
    """Truths on a grid, far apart; an answer that places some of them within 4 of 10 pixels, each once; false boxes."""
    true = [(x, y, x + 10, y + 10) for x in (0, 40, 80) for y in (0, 40, 80)][: draw(st.integers(1, 9))]
    shift = st.integers(0, 4)
    right = [
        (x1 + draw(shift), y1 + draw(shift), x2, y2)
        for x1, y1, x2, y2 in draw(st.lists(st.sampled_from(true), unique=True, min_size=1))
    ]
    false = [(x, 200, x + 9, 210) for x in range(0, 20 * draw(st.integers(0, 5)), 20)]
    return true, right, false


@given(scenes(), st.data())
def test_a_duplicate_or_a_missed_object_never_pays(
    scene: tuple[list[Box], list[Box], list[Box]], data: st.DataObject
) -> None:
    true, right, false = scene
    before = reward([*right, *false], true)
    assert before["duplicates"] == 0
    number = data.draw(st.integers(0, len(right) - 1))
    repeated = reward([*right, *false, right[number]], true)
    assert repeated["duplicates"] == pytest.approx(-1 / (len(right) + len(false) + 1))
    missed = reward([*right[:number], *right[number + 1 :], *false], true)
    wrong = reward([*right, *false, (300, 300, 310, 310)], true)
    for other in (repeated, missed, wrong):
        assert other["total"] < before["total"]
        assert all(other[name] <= before[name] + 1e-12 for name in RANGES)
    more = reward([*right, *false, right[number], right[number]], true)
    assert more["total"] < repeated["total"], "the second one costs as well"


def test_an_image_without_objects_has_a_right_answer() -> None:
    assert reward([], []) == BEST
    invented = reward([(0, 0, 5, 5)], [])
    assert dict(invented) == {**dict.fromkeys(RANGES, 0.0), "format": 1.0, "total": 0.5}
    assert reward("none", [])["format"] == 0


NOT_WHOLE = ["", ', "}]', '[{"bbox_2d": [', "I see nothing.", "[", "]", answer([(0, 0, 5, 5)])[:-1]]


@pytest.mark.parametrize("text", NOT_WHOLE)
@pytest.mark.parametrize("true", [[], [(0, 0, 5, 5)]], ids=["no objects", "one object"])
def test_an_answer_that_is_not_read_whole_earns_nothing(text: str, true: list[Box]) -> None:
    target = try_task(make_task(), row(true), text)
    quality = target.quality
    assert (quality.num_predictions, quality.num_pairs, quality.sum_iou, quality.num_gated) == (0, 0, 0.0, 0)
    assert target.match is not None
    assert (target.match.predicted, target.match.pairs) == ((), ())
    assert quality.reward == {**dict.fromkeys(RANGES, 0.0), "misses": -len(true), "total": -len(true) / 2}


@pytest.mark.parametrize(
    "said", ['[], "}]', "[] nothing here", "I see nothing: []", "<think></think>[]", "[[]]"]
)
def test_only_an_empty_list_alone_is_right_where_nothing_is(said: str) -> None:
    assert dict(reward(said, [])) == {**dict.fromkeys(RANGES, 0.0), "total": 0.0}
    assert reward("```json\n[]\n```\n", []) == BEST


@pytest.mark.parametrize(
    "spoil", ['{}, "}}]', "{} and no more", "I see [one]: {}", "<think>hm</think>{}", "{0} {0}"]
)
def test_text_beside_the_list_costs_the_format_alone(spoil: str) -> None:
    found = reward(spoil.format(answer([(0, 0, 5, 5)])), [(0, 0, 5, 5)])
    assert found == {**BEST, "format": 0.0, "total": 2.0}


def test_a_bad_object_in_a_whole_answer_costs_the_format_alone() -> None:
    found = reward(answer([(0, 0, 5, 5)])[:-1] + ", 7]", [(0, 0, 5, 5)])
    assert found == {**BEST, "format": 0.0, "total": 2.0}


@given(st.lists(boxes, min_size=1, max_size=4), st.data())
def test_no_beginning_of_an_answer_earns_anything(true: list[Box], data: st.DataObject) -> None:
    whole = answer(true)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for truth in (true, []):
        assert reward(cut, truth)["total"] <= 0


def test_boxes_by_hand() -> None:
    """Of three truths one is found exactly and once more, and one by half of its area."""
    said = [(0, 0, 10, 10), (20, 0, 30, 5), (0, 0, 10, 9), (50, 50, 60, 60)]
    wanted = {"f1": 4 / 7, "iou": (1 + 1 / 2) / 3, "format": 1, "duplicates": -1 / 4, "misses": -1 / 3}
    found = reward(said, [(0, 0, 10, 10), (20, 0, 30, 10), (80, 80, 90, 90)])
    assert dict(found) == pytest.approx(wanted | {"total": 4 / 7 + 1 / 2 + 0.5 - 1 / 8 - 1 / 6})
    truncated = replace(MatchQuality(1, 1, 1, 1.0, 0, 0), num_truncated=1)
    assert reward_terms(truncated)["format"] == 0


def test_points_have_their_closeness_as_iou() -> None:
    said = json.dumps([{"point_2d": [x, y], "label": "a"} for x, y in ((115, 20), (10, 10), (115, 20))])
    true = {"objects": {"ref": ["a"] * 3, "bbox": [[10, 10], [100, 20], [250, 300]]}}
    found = try_task(POINTS, true, said, (300, 400)).quality.reward  # diagonal 500: the limit is 25
    wanted = {"f1": 4 / 6, "iou": (1 + 10 / 25) / 3, "format": 1, "duplicates": -1 / 3, "misses": -1 / 3}
    assert dict(found) == pytest.approx(wanted | {"total": 4 / 6 + 1.4 / 3 + 0.5 - 1 / 6 - 1 / 6})


# --- weights and a user's own ---------------------------------------------------------------------------


def test_written_weights_replace_defaults_one_by_one() -> None:
    task = task_of(config_of({"stage2_ab.channel_b.reward.weights": {"f1": 4, "format": 0}}))
    found = reward([(0, 0, 5, 5), (0, 0, 5, 5)], [(0, 0, 5, 5)], task)
    assert found["total"] == pytest.approx(4 * 2 / 3 + 1 - 0.5 / 2)


@pytest.mark.parametrize(
    ("terms", "declared"),
    [
        ({"f1": 1.0}, "own"),
        ({"own": float("nan")}, "own"),
        ({"own": 1e7}, "own"),
        ({}, "own"),
        ({"total": 1.0}, "total"),
    ],
)
def test_terms_that_are_not_declared_are_the_tasks_fault(terms: dict[str, float], declared: str) -> None:
    task: Any = make_task()
    task.reward, task.reward_terms = (lambda *_: terms), {declared: 1.0}
    with pytest.raises(TaskError, match=f"for each of {declared}, and total is the name of their sum, got"):
        reward([], [], task)


@pytest.mark.parametrize("value", [True, 1, np.float32(1)])
def test_terms_are_told_as_plain_numbers(value: Any) -> None:
    task: Any = make_task()
    task.reward, task.reward_terms = (lambda *_: {"own": value}), {"own": 0.5}
    found = reward([], [], task)
    assert found == {"own": 1.0, "total": 0.5}
    assert {type(each) for each in found.values()} == {float}, "the ledger's form has floats"


def test_the_reward_changes_nothing_that_is_trained() -> None:
    def trained(target: Target) -> Target:
        return replace(target, quality=replace(target.quality, reward={}))

    task: Any = make_task()
    task.reward_weights = dict.fromkeys(REWARD_WEIGHTS, 7.0)
    said, true = answer([(0, 0, 5, 5)]), row([(0, 0, 5, 6), (9, 9, 12, 12)])
    assert trained(try_task(task, true, said)) == trained(try_task(make_task(), true, said))
