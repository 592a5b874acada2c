"""Channel B's encoder against ms-swift's own ``template.encode`` on images that are really resized."""

from __future__ import annotations

import base64
import copy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from real_model import (
    Rows,
    answer_and_objects,
    boxes_of,
    make_encoder,
    make_task,
    make_template,
    rollout_of,
    sample_of,
    segment_of,
)

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.parsing import parse_rollout
from swift_stage2.channel_b.preprocessing import make_target
from swift_stage2.channel_b.targets import TokenGroup
from swift_stage2.errors import SampleError
from swift_stage2.records import Sample, Segment

ORIGINAL = (150, 100)
RESIZED = (140, 112)  # the multiples of 28 next to 150 x 100
CLOSING_WEIGHT = 0.5


@pytest.fixture
def template() -> Any:
    """The oracle: by default ms-swift leaves weights out of an encoding."""
    return make_template(is_binary_loss_scale=False)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


@pytest.fixture(scope="module")
def thousandth_encoder() -> Encoder:
    """The same template speaking 0..1000, as Qwen3-VL's does."""
    return make_encoder(make_template(norm_bbox="norm1000"))


def _converted(row: dict[str, Any], space: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Original pixels to another space in exact arithmetic, halves to even."""
    return tuple(
        tuple(round(Fraction(value) * space[i % 2] / ORIGINAL[i % 2]) for i, value in enumerate(box))
        for box in row["objects"]["bbox"]
    )


def _encode_whole(template: Any, row: dict[str, Any], segment: Segment, num_prompt: int) -> dict[str, Any]:
    """The same conversation through the template, the answer as token ids with a weight each."""
    answer = segment.encodings[0]["input_ids"][num_prompt:-2]
    weights = segment.encodings[0]["loss_scale"][num_prompt:-2]
    content = {"token_ids": answer, "loss_scale": weights}
    messages = [row["messages"][0], {"role": "assistant", "content": content}]
    encoding: dict[str, Any] = template.encode(
        {"messages": messages, "images": row["images"]}, return_length=True
    )
    return encoding


def _segment_with_gaps(encoder: Encoder, sample: Sample) -> tuple[PromptEncoding, Segment]:
    weights = {
        TokenGroup.STRUCTURE: 0.0,
        TokenGroup.MISSED_LABEL: 2.0,
        TokenGroup.MISSED_COORDINATES: 0.25,
        TokenGroup.CLOSURE: CLOSING_WEIGHT,
    }
    return encoder.encode_prompt(sample), segment_of(encoder, make_task(weights=weights), sample)


@pytest.mark.parametrize("number", range(4))
def test_a_segment_is_what_the_template_makes_of_the_whole_conversation(
    encoder: Encoder, template: Any, rows: Rows, number: int
) -> None:
    prompt, segment = _segment_with_gaps(encoder, sample_of(rows[number]))
    num_prompt = len(prompt.token_ids)
    whole = _encode_whole(template, rows[number], segment, num_prompt)
    ours = dict(segment.encodings[0])
    assert list(ours["input_ids"]) == list(whole["input_ids"])
    assert ours["labels"] == whole["labels"]
    assert ours["loss_scale"][:-2] == pytest.approx(whole["loss_scale"][:-2])
    assert ours["loss_scale"][-2:] == [CLOSING_WEIGHT] * 2, "the end of the turn weighs what closure weighs"
    for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
        assert torch.equal(ours[name], whole[name]), name
    assert (ours["length"], ours["lengths"]) == (whole["length"], whole["lengths"])
    assert ours.keys() == whole.keys()
    assert segment.num_tokens == len(whole["input_ids"])
    assert segment.num_supervised_tokens == sum(label != -100 for label in whole["labels"])


def test_the_batch_is_what_the_templates_own_collator_gives(
    encoder: Encoder, template: Any, rows: Rows
) -> None:
    template.padding_free = True
    wholes, segments = [], []
    for row in rows[:3]:
        segment = segment_of(encoder, make_task(), sample_of(row))
        num_prompt = len(encoder.encode_prompt(sample_of(row)).token_ids)
        wholes.append(_encode_whole(template, row, segment, num_prompt))
        segments.append(segment)
    expected = template.data_collator(wholes)
    ours = encoder.collate(segments)
    text_positions = expected.pop("text_position_ids")
    assert torch.equal(ours["position_ids"][0], text_positions)
    assert torch.equal(ours["position_ids"][1:], expected.pop("position_ids"))
    ours.pop("position_ids")
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name
    assert ours["input_ids"].shape == (1, sum(segment.num_tokens for segment in segments))


def test_weights_land_on_the_tokens_they_are_for(encoder: Encoder, rows: Rows) -> None:
    sample = sample_of(rows[0])
    weights = {group: float(number) for number, group in enumerate(TokenGroup, start=1)}
    first_box = boxes_of(encoder, sample)[1]
    answer = f'[{{"bbox_2d": {list(first_box)}, "label": "{sample.truth.labels[1]}"}}]'
    segment = segment_of(encoder, make_task(weights=weights), sample, answer)
    tokenizer = make_template().tokenizer
    by_group: dict[float, str] = {}
    for token, weight in zip(
        segment.encodings[0]["input_ids"], segment.encodings[0]["loss_scale"], strict=True
    ):
        by_group[weight] = by_group.get(weight, "") + tokenizer.decode([token])
    assert by_group[weights[TokenGroup.MATCHED_LABEL]] == sample.truth.labels[1]
    matched = by_group[weights[TokenGroup.MATCHED_COORDINATES]]
    assert matched == ", ".join(map(str, first_box))
    missed = [label for number, label in enumerate(sample.truth.labels) if number != 1]
    assert by_group[weights[TokenGroup.MISSED_LABEL]] == "".join(missed)
    assert by_group[weights[TokenGroup.CLOSURE]] == '"}]<|im_end|>\n'
    assert by_group[0.0].startswith("<|im_start|>user"), "the prompt carries no weight"


def test_a_segment_longer_than_a_pack_is_refused_and_never_cut(rows: Rows) -> None:
    sample = sample_of(rows[0])
    whole = segment_of(make_encoder(), make_task(), sample)
    exact = make_encoder(packing_length=whole.num_tokens)
    assert segment_of(exact, make_task(), sample).num_tokens == whole.num_tokens
    short = make_encoder(packing_length=whole.num_tokens - 1)
    with pytest.raises(
        SampleError, match=f"num_tokens={whole.num_tokens} packing_length={whole.num_tokens - 1}"
    ):
        segment_of(short, make_task(), sample)


# --- coordinates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("space", "fixture"), [(RESIZED, "encoder"), ((1000, 1000), "thousandth_encoder")])
def test_matching_and_target_happen_in_the_templates_space(
    request: pytest.FixtureRequest, rows: Rows, space: tuple[int, int], fixture: str
) -> None:
    """An answer that names the last object first is matched, and the target repeats it in that space."""
    encoder: Encoder = request.getfixturevalue(fixture)
    for row in rows[:6]:
        assert boxes_of(encoder, sample_of(row)) == _converted(row, space)
        assert _converted(row, space) != tuple(map(tuple, row["objects"]["bbox"])), "it is really resized"
    sample, boxes = sample_of(rows[0]), _converted(rows[0], space)
    last = len(boxes) - 1
    answer = f'[{{"bbox_2d": {list(boxes[last])}, "label": "{sample.truth.labels[last]}"}}]'
    prompt = encoder.encode_prompt(sample)
    target = make_target(rollout_of(sample, answer, prompt.token_ids), prompt, encoder, make_task())
    assert (target.quality.num_pairs, target.quality.sum_iou) == (1, pytest.approx(1.0))
    expected = [(sample.truth.labels[n], boxes[n]) for n in (last, *range(last))]
    assert [(found.label, found.box) for found in parse_rollout(target.text).objects] == expected


@pytest.mark.parametrize("fixture", ["encoder", "thousandth_encoder"])
def test_a_box_outside_its_image_is_refused(request: pytest.FixtureRequest, rows: Rows, fixture: str) -> None:
    row = copy.deepcopy(rows[0])
    row["objects"]["bbox"][0][2] = 160
    with pytest.raises(SampleError, match="a box must lie inside its image, got bbox="):
        boxes_of(request.getfixturevalue(fixture), sample_of(row))


# --- the request ---------------------------------------------------------------------------------


def test_the_request_carries_the_prompt_and_the_original_files(encoder: Encoder, rows: Rows) -> None:
    request = encoder.request(sample_of(rows[0]))
    assert request["messages"] == rows[0]["messages"][:1]
    (image,) = request["images"]
    assert base64.b64decode(image) == Path(rows[0]["images"][0]).read_bytes()


def test_images_in_any_form_of_the_data_set_are_sent(
    encoder: Encoder, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(rows[0]["images"][0])
    content = path.read_bytes()
    for image in ({"path": str(path), "bytes": None}, {"path": None, "bytes": content}):
        (sent,) = encoder.request(replace(sample_of(rows[0]), row={**rows[0], "images": [image]}))["images"]
        assert base64.b64decode(sent) == content
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(path.parent))
    monkeypatch.chdir(tmp_path)
    relative = {**rows[0], "images": [path.name]}
    (sent,) = encoder.request(replace(sample_of(rows[0]), row=relative))["images"]
    assert base64.b64decode(sent) == content
    with Image.open(path) as picture:
        (sent,) = encoder.request(replace(sample_of(rows[0]), row={**rows[0], "images": [picture]}))["images"]
    assert base64.b64decode(sent).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [{"role": "user", "content": "find the <bbox>"}]}, "a prompt must not hold"),
        ({"messages": [{"role": "user", "content": "find a <ref-object>"}]}, "a prompt must not hold"),
        ({"messages": [{"role": "assistant", "content": "[]"}]}, "a row must end in a user message"),
        ({"videos": ["a.mp4"]}, "about images alone, got a row with videos; .*channel_a_only"),
        ({"audios": ["a.mp3"]}, "about images alone, got a row with audios; .*channel_a_only"),
    ],
)
def test_a_row_that_nobody_can_be_asked_about_is_refused(
    encoder: Encoder, rows: Rows, changes: dict[str, Any], message: str
) -> None:
    sample = sample_of({**rows[0], **changes})
    for ask in (encoder.request, encoder.encode_prompt):
        with pytest.raises(SampleError, match=message):
            ask(sample)


# --- channel A's answer --------------------------------------------------------------------------


@pytest.mark.parametrize(("space", "fixture"), [(RESIZED, "encoder"), ((1000, 1000), "thousandth_encoder")])
def test_channel_as_own_answer_spells_out_the_ground_truth(
    request: pytest.FixtureRequest, rows: Rows, space: tuple[int, int], fixture: str
) -> None:
    sample = sample_of(rows[0])
    answer, objects = answer_and_objects(request.getfixturevalue(fixture), sample)
    boxes = _converted(rows[0], space)
    assert objects == tuple(zip(sample.truth.labels, boxes, strict=True))
    listed = ", ".join(
        f'{{"bbox_2d": {list(box)}, "label": "{label}"}}'
        for label, box in zip(sample.truth.labels, boxes, strict=True)
    )
    assert answer == f"[{listed}]"


# --- one thread owns the encoder -------------------------------------------------------------------


def test_what_channel_a_does_to_its_template_does_not_reach_the_encoder(rows: Rows) -> None:
    template = make_template()
    template.processor = copy.deepcopy(template.processor)  # the other tests' as well
    encoder, sample = make_encoder(template), sample_of(rows[0])
    before = segment_of(encoder, make_task(), sample)
    template.set_mode("transformers")
    template.norm_bbox = "norm1000"
    template.tokenizer.add_tokens(["[{"])
    after = segment_of(encoder, make_task(), sample)
    assert after.encodings[0]["input_ids"] == before.encodings[0]["input_ids"]
    assert after.encodings[0]["labels"] == before.encodings[0]["labels"]


def test_the_encoder_leaves_channel_as_template_alone(rows: Rows) -> None:
    template = make_template()
    before = template.encode(copy.deepcopy(rows[0]))
    encoder = make_encoder(template)
    segments = [segment_of(encoder, make_task(), sample_of(row)) for row in rows[:2]]
    encoder.collate(segments)
    assert template.padding_free is False
    assert template.mode == "train"
    assert template.model is not None
    after = template.encode(copy.deepcopy(rows[0]))
    assert after["input_ids"] == before["input_ids"]
    assert template.tokenizer is not encoder._tokenizer
