"""Both channels teach one format: real rows through the real template, token by token; and images without objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from real_model import (
    Rows,
    answer_and_objects,
    make_encoder,
    make_task,
    make_template,
    sample_of,
    segment_of,
    summed_loss,
    tiny_model,
)

from swift_stage2.channel_b.detection import DetectionTask
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import make_pack
from swift_stage2.checks.packing_isolation import check_isolation, isolation_batches
from swift_stage2.errors import ConfigError

LENGTH = 2000
OBJECT = '{"label": "<ref-object>", "bbox_2d": <bbox>}'
Spell = Callable[[int], str]


def _fenced(count: int) -> str:
    return "```json\n[\n  " + ",\n  ".join([OBJECT] * count) + "\n]\n```" if count else "```json\n[]\n```"


def _compact(count: int) -> str:
    return "[" + ",".join(['{"bbox_2d":<bbox>,"label":"<ref-object>"}'] * count) + "]"


def _map(count: int) -> str:
    items = [f'"object_{n}": {{"bbox_2d": <bbox>, "desc": "<ref-object>"}}' for n in range(count)]
    return "{" + ",\n".join(items) + "}"


def _written(row: dict[str, Any], spell: Spell) -> dict[str, Any]:
    """The row with its answer spelled in another way."""
    answer = {"role": "assistant", "content": spell(len(row["objects"]["bbox"]))}
    return {**row, "messages": [row["messages"][0], answer]}


def _without_objects(row: dict[str, Any], answer: str = "[]") -> dict[str, Any]:
    messages = [row["messages"][0], {"role": "assistant", "content": answer}]
    return {**row, "messages": messages, "objects": {"ref": [], "bbox": []}}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder(packing_length=LENGTH)


def _learned(rows: Rows, encoder: Encoder, dialect: str = "object_list") -> DetectionTask:
    return make_task(dialect).learn(rows, sample_of(rows[0]), encoder)


@pytest.mark.parametrize(
    ("spell", "dialect"), [(_fenced, "object_list"), (_compact, "object_list"), (_map, "object_map")]
)
def test_a_perfect_prediction_is_taught_what_channel_a_teaches(
    rows: Rows, encoder: Encoder, template: Any, spell: Spell, dialect: str
) -> None:
    """The same tokens are supervised, the end of the turn included."""
    written = [_written(row, spell) for row in rows[:2]]
    task = _learned(written, encoder, dialect)
    for row in written:
        channel_a = template.encode(copy.deepcopy(row))
        supervised = [token for token in channel_a["labels"] if token != -100]
        sample = sample_of(row)
        answer, objects = answer_and_objects(encoder, sample)
        task.check_answer(answer, objects)
        segment = segment_of(encoder, task, sample, answer)
        assert segment.quality.num_pairs == len(objects) > 0
        assert [token for token in segment.encodings[0]["labels"] if token != -100] == supervised
        assert list(segment.encodings[0]["input_ids"]) == list(channel_a["input_ids"])


def test_every_row_teaches_not_only_the_sample(rows: Rows, encoder: Encoder) -> None:
    one = rows[0]["objects"]
    single = {**rows[0], "objects": {"ref": one["ref"][:1], "bbox": one["bbox"][:1]}}
    written = [_written(single, _fenced), _written(rows[1], _fenced), _without_objects(rows[2])]
    learned = _learned(written, encoder).template
    assert learned.separator == ",\n  "
    assert learned.empty == "[]", "as the row has it, whatever stands around answers with objects"


@pytest.mark.parametrize("label", ['say "é"', "a\nb", "back\\slash"])
def test_a_label_that_its_placeholder_does_not_escape_is_refused(
    rows: Rows, encoder: Encoder, label: str
) -> None:
    row = copy.deepcopy(rows[3])
    row["objects"]["ref"][0] = label
    with pytest.raises(ConfigError, match="no quote or line break in a label"):
        _learned([rows[0], row], encoder)
    with pytest.raises(ConfigError, match="which channel B would write"):
        make_task().check_answer(*answer_and_objects(encoder, sample_of(row)))


@pytest.mark.parametrize("answer", [None, "I see nothing.", "[", "{}"])
def test_an_answer_that_leaves_an_object_out_or_is_no_closed_list_is_refused_with_both_texts(
    rows: Rows, encoder: Encoder, answer: str | None
) -> None:
    row = rows[0] if answer is None else _without_objects(rows[0], answer)
    text, objects = answer_and_objects(encoder, sample_of(row))
    with pytest.raises(ConfigError, match="which channel B would write") as caught:
        make_task().check_answer(text, objects[:-1])
    assert (objects[-1][0] if objects else "write '[]'") in str(caught.value)


def test_a_template_that_writes_more_than_the_row_is_refused(rows: Rows) -> None:
    template = make_template()
    prepare = template._swift_prepare_inputs

    def with_prefix(inputs: Any) -> None:
        prepare(inputs)
        inputs.messages[-1]["content"] = "thought: none\n\n" + (inputs.messages[-1]["content"] or "")

    template._swift_prepare_inputs = with_prefix
    encoder = make_encoder(packing_length=LENGTH)
    encoder._template = template
    with pytest.raises(ConfigError, match="thought: none"):
        _learned(rows, encoder)


def test_only_the_last_answer_of_a_conversation_is_compared(rows: Rows, encoder: Encoder) -> None:
    turns = [
        *rows[0]["messages"][:1],
        {"role": "assistant", "content": "Shapes."},
        {"role": "user", "content": "Where?"},
    ]
    answer, objects = answer_and_objects(
        encoder, sample_of({**rows[0], "messages": [*turns, rows[0]["messages"][1]]})
    )
    assert answer.startswith('[{"bbox_2d"')
    make_task().check_answer(answer, objects)


# --- images without objects ----------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["[]", "```json\n[]\n```"])
def test_an_image_without_objects_is_taught_as_channel_a_teaches_it(
    rows: Rows, encoder: Encoder, template: Any, answer: str
) -> None:
    spell = _fenced if "`" in answer else _compact
    written = [_written(rows[0], spell), _without_objects(rows[1], answer)]
    task = _learned(written, encoder)
    sample = sample_of(written[1])
    hallucinated = encoder.answer_of(sample_of(written[0]))
    segment = segment_of(encoder, task, sample, hallucinated)
    channel_a = template.encode(copy.deepcopy(written[1]))
    assert segment.encodings[0]["labels"] == channel_a["labels"]
    quality = segment.quality
    num_false = len(rows[0]["objects"]["ref"])
    assert (quality.num_predictions, quality.num_ground_truth, quality.num_pairs) == (num_false, 0, 0)
    right = segment_of(encoder, task, sample, answer).quality
    assert right == replace(quality, num_predictions=0, reward=right.reward)
    assert (right.reward["total"], quality.reward["total"]) == (2.5, 0.5), "silence is right here"


def test_a_pack_of_empty_answers_trains(rows: Rows, encoder: Encoder) -> None:
    """The real collator, and the isolation of segments that have next to nothing to say."""
    samples = [sample_of(_without_objects(row), position) for position, row in enumerate(rows[:3])]
    task = make_task(same_label=True)
    segments = [
        segment_of(encoder, task, sample, text) for sample, text in zip(samples, ("", "[]", "x"), strict=True)
    ]
    pack = make_pack("p", segments, encoder)
    labels = torch.as_tensor(pack.batch["labels"])
    assert int((labels != -100).sum()) == pack.num_supervised_tokens == 3 * len(_supervised("[]", encoder))
    model, _ = tiny_model()
    batches = isolation_batches(encoder, task, samples)
    check_isolation(batches, lambda batch: summed_loss(model, {"use_cache": False, **batch}))


def _supervised(text: str, encoder: Encoder) -> list[int]:
    return [*encoder.tokenise(text)[0], *encoder.closing_token_ids]
