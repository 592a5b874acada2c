"""Corrected rows: channel A's answer to each is channel B's target for the same answer of a model, to the letter."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from detection_task import make_task
from fake_rollout_server import Answer, Call, FakeRolloutServer, error
from real_model import STAGE1, make_encoder, rollout_of, sample_of
from test_asking import answers

from swift_stage2.channel_b.preprocessing import make_target
from swift_stage2.cli import main
from swift_stage2.config import MissedOrder
from swift_stage2.demo.demo_config import evaluation_command
from swift_stage2.evaluate.correct_command import reordered


def answer_of(row: dict[str, Any], numbers: random.Random) -> str:
    """Some of its boxes in any order, moved a little, one twice; at times cut off."""
    boxes = numbers.sample(row["objects"]["bbox"], numbers.randint(0, len(row["objects"]["bbox"])))
    moved = [[edge + numbers.randint(0, 3) for edge in box] for box in [*boxes, *boxes[:1]]]
    text = json.dumps([{"bbox_2d": box, "label": "car"} for box in moved])
    return text[: None if numbers.random() < 0.8 else 60]


@pytest.mark.parametrize("order", [MissedOrder.GIVEN, MissedOrder.READING, MissedOrder.RANDOM])
def test_a_corrected_row_says_what_channel_b_would_train(
    rows: list[dict[str, Any]], order: MissedOrder
) -> None:
    encoder, task, numbers = make_encoder(), make_task(missed_order=order), random.Random(1)
    num_changed = 0
    for number, row in enumerate(rows * 3):
        sample, text = sample_of(row, number), answer_of(row, numbers)
        prompt = encoder.encode_prompt(sample)
        truth = task.to_space(sample.truth, prompt.convert)
        corrected = reordered(row, task.order_of(text, truth, sample.key))
        expected = make_target(rollout_of(sample, text, prompt.token_ids), prompt, encoder, task).text
        assert encoder.answer_of(sample_of(corrected, number)) == expected
        num_changed += corrected != row
    assert num_changed > 8


def correct(data: Path, output: Path, *more: str) -> int:
    words = evaluation_command(data, STAGE1, output)[4:]
    return main(["correct", *words, *more])


def test_rows_keep_their_number_and_order_and_one_without_an_answer_stays(
    rows_file: Path, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server finds each row's last object alone; one row it refuses."""
    encoder = make_encoder()
    requests = [encoder.request(sample_of(row))["images"][0] for row in rows]
    prompt = list(encoder.encode_prompt(sample_of(rows[0])).token_ids)
    task = make_task()

    def answer(call: Call) -> Answer:
        number = requests.index(call.requests[0]["images"][0])
        sample = sample_of(rows[number])
        truth = task.to_space(sample.truth, encoder.encode_prompt(sample).convert)
        found = [{"bbox_2d": list(box), "label": label} for label, box in truth[-1:]]
        return error(400, "this image") if number == 2 else answers(call, prompt, json.dumps(found))

    output = tmp_path / "corrected.jsonl"
    with FakeRolloutServer(on_infer=answer) as server:
        assert correct(rows_file, output, "--server", server.url, "--temperature", "0.3") == 1
        assert {call.config["temperature"] for call in server.infer_calls} == {0.3}
    assert "1 rows were not corrected" in capsys.readouterr().err
    found = [json.loads(line) for line in output.read_text().splitlines()]
    for number, (row, own) in enumerate(zip(rows, found, strict=True)):
        expected = {name: [*values[-1:], *values[:-1]] for name, values in row["objects"].items()}
        assert own == {**row, "objects": row["objects"] if number == 2 else expected}


def test_an_answer_without_placeholders_is_refused_before_anything_is_asked(
    rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(rows[0]).replace("<ref-object>", "car")
    (tmp_path / "rows.jsonl").write_text(text + "\n")
    with FakeRolloutServer() as server:
        assert correct(tmp_path / "rows.jsonl", tmp_path / "new.jsonl", "--server", server.url) == 2
        assert server.infer_calls == []
    assert "write these placeholders" in capsys.readouterr().err
