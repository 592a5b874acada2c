"""The detection task: rollout text in, corrected target out; and the check of channel A's answer format."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from real_model import Rows, answer_and_objects, make_encoder, make_task, make_template, sample_of

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.dialects import DIALECTS
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.channel_b.task import try_task
from swift_stage2.errors import ConfigError
from swift_stage2.records import Target

LABELS = ("cat", "dog", "owl")
BOXES = ((0, 0, 40, 40), (50, 50, 90, 90), (10, 60, 30, 100))


def _answer(*objects: tuple[str, Sequence[int]]) -> str:
    return "[" + ", ".join(f'{{"bbox_2d": {list(box)}, "label": "{label}"}}' for label, box in objects) + "]"


def _correct(task: DetectionTask, text: str) -> Target:
    return try_task(task, {"objects": {"ref": list(LABELS), "bbox": [list(box) for box in BOXES]}}, text)


def _objects(target: Target, dialect: str = "object_list") -> list[tuple[str, tuple[int, ...]]]:
    return [(found.label, found.box) for found in parse_rollout(target.text, DIALECTS[dialect]).objects]


def test_the_predicted_order_comes_first_and_what_was_missed_follows() -> None:
    text = _answer(("owl", BOXES[2]), ("ghost", (500, 500, 510, 510)), ("a cat?", (0, 0, 40, 38)))
    target = _correct(make_task(), text)
    assert _objects(target) == [(LABELS[2], BOXES[2]), (LABELS[0], BOXES[0]), (LABELS[1], BOXES[1])]
    quality = target.quality
    assert (quality.num_predictions, quality.num_ground_truth, quality.num_pairs) == (3, 3, 2)
    assert quality.sum_iou == pytest.approx(1 + 38 / 40)
    assert dict(quality.dropped) == {}


@pytest.mark.parametrize("text", ["", "I see nothing.", "[]", "[7]", _answer(("x", (700, 700, 710, 710)))])
def test_a_rollout_without_a_usable_object_trains_the_ground_truth_in_its_own_order(text: str) -> None:
    target = _correct(make_task(), text)
    assert _objects(target) == list(zip(LABELS, BOXES, strict=True))
    assert target.quality.num_pairs == 0


@pytest.mark.parametrize(("end", "num_predictions"), [("]", 1), (', {"bbox_2d": [5', 0)])
def test_dropped_objects_are_counted(end: str, num_predictions: int) -> None:
    text = '[{"bbox_2d": [1, 2, 3], "label": "cat"}, {"bbox_2d": [10, 60, 30, 100], "label": "cat"}' + end
    target = _correct(make_task(), text)
    quality = target.quality
    assert _objects(target)[0] == (LABELS[2], BOXES[2]), "the order counts, also of what was not read whole"
    assert (quality.num_predictions, quality.num_pairs) == (num_predictions, num_predictions)
    assert dict(quality.dropped) == {"wrong_arity": 1}


def test_the_same_label_is_asked_for_only_when_it_is_configured() -> None:
    text = _answer(("dog", BOXES[0]))
    assert _correct(make_task(same_label=False), text).quality.num_pairs == 1
    assert _correct(make_task(same_label=True), text).quality.num_pairs == 0
    assert _correct(make_task(same_label=True), "").quality.num_pairs == 0


# --- the format of channel A's answers -------------------------------------------------------------


def test_the_box_format_between_special_tokens_is_refused_with_its_remedy(rows: Rows) -> None:
    template = make_template()
    template.bbox_format = "legacy"
    answer, objects = answer_and_objects(make_encoder(template), sample_of(rows[0]))
    assert "<|box_start|>" in answer
    with pytest.raises(ConfigError, match="set QWENVL_BBOX_FORMAT=new"):
        make_task().check_answer(answer, objects)


def test_an_answer_in_another_coordinate_space_is_refused(rows: Rows) -> None:
    """Boxes that are written out in original pixels pass through the template unconverted."""
    written = _answer(*zip(rows[0]["objects"]["ref"], rows[0]["objects"]["bbox"], strict=True))
    messages = [rows[0]["messages"][0], {"role": "assistant", "content": written}]
    answer, objects = answer_and_objects(make_encoder(), sample_of({**rows[0], "messages": messages}))
    assert answer == written
    with pytest.raises(ConfigError, match="placeholders <bbox> and <ref-object>"):
        make_task().check_answer(answer, objects)
