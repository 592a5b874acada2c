"""A running server's answers: our own server with the tiny model to the end, and servers that fail in every way."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_rollout_server import Answer, Call, FakeRolloutServer, error
from real_model import STAGE1, make_encoder, rollout_of, sample_of, tiny_model

from swift_stage2.channel_b.dialects import OBJECT_LIST, POINT_LIST
from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.cli import main
from swift_stage2.data.prediction import (
    FAILED,
    TrueRow,
    read_predictions,
    read_rows,
    write_predictions,
)
from swift_stage2.demo.demo_config import evaluation_command
from swift_stage2.errors import ServerUnavailable, UserError
from swift_stage2.evaluate.asking import AskingSettings, ask_server
from swift_stage2.records import MatchQuality, Target

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout_server"))

from live_server import MODEL, load_generator, serve

from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine

START_TIMEOUT_S = 240.0
QUESTIONS = AskingSettings(dialect=OBJECT_LIST, max_new_tokens=64, timeout_s=10.0, num_in_flight=4)
WIDTH, HEIGHT, WIDE, HIGH = 150, 100, 140, 112  # of the files, and as the model sees them


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


@pytest.fixture
def true_rows(rows_file: Path) -> list[TrueRow]:
    return read_rows(rows_file)


@pytest.fixture
def prompt_ids(encoder: Encoder, true_rows: list[TrueRow]) -> list[int]:
    """Of every row: all ask one question about images of one size."""
    return list(encoder.encode_prompt(sample_of(true_rows[0].row)).token_ids)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersRolloutEngine]:
    engine = TransformersRolloutEngine(load_generator, model=str(MODEL), max_batch_size=16)
    assert engine.wait_loaded(START_TIMEOUT_S)
    yield engine
    engine.close(timeout_s=10.0)


def answers(call: Call, prompt_ids: list[int], text: str, finish_reason: str = "stop") -> Answer:
    choice = {"message": {"content": text}, "finish_reason": finish_reason, "token_ids": [1, 2]}
    item = {"response": {"choices": [choice], "prompt_token_ids": prompt_ids}}
    return Answer(body=json.dumps([item] * len(call.requests)).encode())


def test_the_tiny_model_is_evaluated_on_our_own_server(
    encoder: Encoder,
    engine: TransformersRolloutEngine,
    rows_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=iter([10.0, 12.5]).__next__)
    monkeypatch.setattr("swift_stage2.evaluate.command.time", clock)
    with serve(engine) as server:
        words = evaluation_command(rows_file, STAGE1, tmp_path / "out")[3:]
        assert main([*words, "--server", server.base_url]) == 0
    predictions = tmp_path / "out" / "predictions.jsonl"
    found = read_predictions(predictions, read_rows(rows_file))
    assert {each and (each.width, each.height) for each in found} == {(WIDTH, HEIGHT)}
    num_boxes = sum(len(each.objects.bbox) for each in found if each)
    assert f"{num_boxes / 2.5:.1f} objects/s with --in-flight 64, http://" in capsys.readouterr().err
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert facts["metrics"]["eval/recall"]["value"] > 0.1
    assert facts["metrics"]["eval/failed_ratio"]["value"] == 0.0
    capsys.readouterr()
    assert main(["evaluate", "--data", str(rows_file), "--predictions", str(predictions), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["metrics"] == facts["metrics"]
    assert facts["metrics"]["eval/ap"]["value"] == facts["ap_by_score"]["both_mean"]
    assert facts["metrics"]["eval/ap_without_scores"]["value"] == facts["ap_by_score"]["none"]
    assert sum(each["objects"] for each in facts["calibration"]) == num_boxes


def test_boxes_become_pixels_and_the_server_is_asked_row_by_row(
    encoder: Encoder, true_rows: list[TrueRow], prompt_ids: list[int]
) -> None:
    text = json.dumps([{"bbox_2d": [14, 28, 70, 112], "label": "car"}])
    progress: list[int] = []
    with FakeRolloutServer(on_infer=lambda call: answers(call, prompt_ids, text, "length")) as server:
        found = ask_server(server.url, true_rows, encoder, QUESTIONS, progress.append)
        assert server.batch_sizes == [1] * 12
        assert server.infer_calls[0].config["temperature"] == 0.0
        assert server.infer_calls[0].config["max_tokens"] == 64
        assert server.infer_calls[0].config["logprobs"]
    assert found[0].log_probs is None
    box = (14 * WIDTH / WIDE, 28 * HEIGHT / HIGH, 70 * WIDTH / WIDE, 112 * HEIGHT / HIGH)
    assert found[0].objects.bbox[0] == pytest.approx(box, abs=0.01)
    assert {each.finish_reason for each in found} == {"length"}
    assert [each.image for each in found] == [row.image for row in true_rows]
    assert progress == sorted(progress)
    assert progress[-1] == 12


def test_points_become_pixels(encoder: Encoder, true_rows: list[TrueRow], prompt_ids: list[int]) -> None:
    text = json.dumps([{"point_2d": [14, 28], "label": "car"}])
    with FakeRolloutServer(on_infer=lambda call: answers(call, prompt_ids, text)) as server:
        found = ask_server(server.url, true_rows[:1], encoder, replace(QUESTIONS, dialect=POINT_LIST))
    assert found[0].objects.bbox == (pytest.approx((14 * WIDTH / WIDE, 28 * HEIGHT / HIGH), abs=0.01),)


def test_objects_have_the_log_probabilities_of_a_forward_pass_over_the_whole_answer(
    encoder: Encoder, engine: TransformersRolloutEngine, true_rows: list[TrueRow]
) -> None:
    model, num_objects = tiny_model()[0], 0
    with serve(engine) as server:
        found = ask_server(server.base_url, true_rows, encoder, replace(QUESTIONS, max_new_tokens=200))
    for row, each in zip(true_rows, found, strict=True):
        sample, text = sample_of(row.row), each.answer or ""
        ids, offsets = encoder.tokenise(text)
        prompt, weights = encoder.encode_prompt(sample), (1.0,) * len(ids)
        target = Target(text, ids, weights, MatchQuality(0, 0, 0, 0.0, 0, 0))
        rollout = rollout_of(sample, text, prompt.token_ids)
        batch = encoder.collate([encoder.encode_segment(rollout, prompt, [(target, None)])])
        inputs = {name: batch[name] for name in batch if name not in ("labels", "loss_scale", "length")}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, -len(ids) - 1 : -1].float()
        forced = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()

        def within(begin: int, end: int, values: list[float] = forced, offsets: Any = offsets) -> list[float]:
            pairs = zip(values, offsets, strict=True)
            return [value for value, (start, stop) in pairs if start < end and begin < stop]

        assert each.log_probs is not None
        places = re.finditer(r'\[(\d+), (\d+), (\d+), (\d+)\], "label": "([^"]*)"', text)
        read = [
            place
            for place in places
            if int(place[1]) <= int(place[3]) and int(place[2]) <= int(place[4]) and each.objects.bbox
        ]
        for one, place in zip(each.log_probs, read, strict=True):
            assert one.label == pytest.approx(within(*place.span(5)), abs=1e-4)
            box = [value for part in range(1, 5) for value in within(*place.span(part))]
            assert one.box == pytest.approx(box, abs=1e-4)
        num_objects += len(each.objects.bbox)
    assert num_objects > 10


@pytest.mark.parametrize(("status", "told"), [(400, "this image"), (504, "too late")])
def test_a_row_that_brings_no_answer_fails_alone(
    encoder: Encoder,
    true_rows: list[TrueRow],
    prompt_ids: list[int],
    capsys: pytest.CaptureFixture[str],
    status: int,
    told: str,
) -> None:
    """One is refused by the server or late, one by the template, and of one the image is not there."""
    bad, first = encoder.request(sample_of(true_rows[2].row))["images"][0], true_rows[0]
    messages = [{"role": "user", "content": "<image>Where is <bbox>?"}, first.row["messages"][-1]]
    number = len(true_rows)
    odd = [
        TrueRow(number, first.image, first.truth, {**first.row, "messages": messages}),
        TrueRow(number + 1, "/none.png", first.truth, {**first.row, "images": ["/none.png"]}),
    ]

    def refuse(call: Call) -> Answer:
        images = [request["images"][0] for request in call.requests]
        return error(status, told) if bad in images else answers(call, prompt_ids, "[]")

    with FakeRolloutServer(on_infer=refuse) as server:
        found = ask_server(server.url, [*true_rows, *odd], encoder, QUESTIONS)
    assert [n for n, each in enumerate(found) if each.finish_reason == FAILED] == [2, number, number + 1]
    assert (found[number].answer, found[number].width, found[number].height) == (None, WIDTH, HEIGHT)
    lines = capsys.readouterr().err
    assert told in lines
    assert "/none.png" in lines


def test_a_label_that_is_no_text_and_a_huge_box_are_kept_readable(
    encoder: Encoder, true_rows: list[TrueRow], prompt_ids: list[int], tmp_path: Path
) -> None:
    text = json.dumps([{"bbox_2d": [1, 2, 10**99, 10**99], "label": "\ud800"}])
    with FakeRolloutServer(on_infer=lambda call: answers(call, prompt_ids, text)) as server:
        found = ask_server(server.url, true_rows[:1], encoder, QUESTIONS)
    write_predictions(tmp_path / "p.jsonl", found)
    assert read_predictions(tmp_path / "p.jsonl", true_rows[:1]) == found
    assert found[0].objects.ref == ("?",)
    with FakeRolloutServer(on_infer=lambda call: answers(call, prompt_ids, text[:-1])) as server:
        (cut_off,) = ask_server(server.url, true_rows[:1], encoder, QUESTIONS)
    assert (cut_off.objects.bbox, cut_off.answer) == (
        (),
        text[:-1],
    )  # of what is not read whole nothing counts


@pytest.mark.parametrize(
    ("on_infer", "refusal", "told"),
    [
        (lambda call: error(500, "no memory"), ServerUnavailable, r"no row was answered.*no memory"),
        (lambda call: answers(call, [1, 2, 3], "[]"), UserError, "pixel limits"),
        (lambda call: Answer(drop=True), ServerUnavailable, "to the end"),
    ],
)
def test_a_server_that_is_of_no_use_ends_the_command(
    encoder: Encoder,
    true_rows: list[TrueRow],
    on_infer: Callable[[Call], Answer],
    refusal: type[UserError],
    told: str,
) -> None:
    with FakeRolloutServer(on_infer=on_infer) as server, pytest.raises(refusal, match=told):
        ask_server(server.url, true_rows[:2], encoder, QUESTIONS)


def test_a_frozen_server_ends_the_command_after_two_deadlines(
    encoder: Encoder, true_rows: list[TrueRow], prompt_ids: list[int]
) -> None:
    """It answers who it is, then a call, then nothing any more: not every row waits for its own deadline."""
    thaw = threading.Event()

    def once(call: Call) -> Answer:
        return answers(call, prompt_ids, "[]") if len(server.infer_calls) == 1 else Answer(after=thaw)

    questions = AskingSettings(dialect=OBJECT_LIST, max_new_tokens=64, timeout_s=2.0, num_in_flight=1)
    with FakeRolloutServer(on_infer=once) as server:
        try:
            with pytest.raises(ServerUnavailable, match="2 calls in a row"):
                ask_server(server.url, true_rows, encoder, questions)
            assert len(server.infer_calls) == 3
        finally:
            thaw.set()


def test_a_server_without_room_is_asked_again(
    encoder: Encoder, true_rows: list[TrueRow], prompt_ids: list[int]
) -> None:
    def full_at_first(call: Call) -> Answer:
        return error(429, "no room") if len(server.infer_calls) == 1 else answers(call, prompt_ids, "[]")

    with FakeRolloutServer(on_infer=full_at_first) as server:
        found = ask_server(server.url, true_rows[:1], encoder, QUESTIONS)
        assert len(server.infer_calls) == 2
    assert found[0].finish_reason == "stop"
