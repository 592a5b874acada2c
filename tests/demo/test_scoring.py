"""Scores equal brute force; answers and rows are read as written."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.make_stage1 import Stage1
from swift_stage2.demo import scoring
from swift_stage2.demo.grounding_dataset import PROMPT, answer_text, write_dataset
from swift_stage2.demo.scenes import Scene, SceneKind, Split, make_scene, scene_seed
from swift_stage2.demo.scoring import score_detections

Object = tuple[str, tuple[int, int, int, int]]

corners = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
boxes = corners.map(lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])))
objects = st.lists(st.tuples(st.sampled_from("ab"), boxes), max_size=4)


def _iou(a: tuple[int, ...], b: tuple[int, ...]) -> Fraction:
    cells = [{(x, y) for x in range(c[0], c[2]) for y in range(c[1], c[3])} for c in (a, b)]
    union = cells[0] | cells[1]
    return Fraction(len(cells[0] & cells[1]), len(union)) if union else Fraction(0)


def _best_pairs(predicted: list[Object], true: list[Object]) -> tuple[int, Fraction]:
    """By trying every one-to-one assignment: most hits, then the largest sum of IoU."""
    best = (0, Fraction(0))
    slots = [*range(len(true)), *([None] * len(predicted))]
    for chosen in set(itertools.permutations(slots, len(predicted))):
        ious = [
            _iou(predicted[i][1], true[j][1])
            for i, j in enumerate(chosen)
            if j is not None and predicted[i][0] == true[j][0]
        ]
        hits = [iou for iou in ious if iou >= Fraction(1, 2)]
        best = max(best, (len(hits), sum(hits, Fraction(0))))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(objects, objects), max_size=2))
def test_equals_brute_force(images: list[tuple[list[Object], list[Object]]]) -> None:
    score = score_detections([p for p, _ in images], [t for _, t in images])
    found = [_best_pairs(predicted, true) for predicted, true in images]
    hits, total = sum(n for n, _ in found), sum((iou for _, iou in found), Fraction(0))
    num_predicted = sum(len(predicted) for predicted, _ in images)
    num_true = sum(len(true) for _, true in images)
    assert score.precision == pytest.approx(hits / num_predicted if num_predicted else 0)
    assert score.recall == pytest.approx(hits / num_true if num_true else 0)
    assert score.f1 == pytest.approx(2 * hits / (num_predicted + num_true) if num_predicted + num_true else 0)
    assert score.mean_iou == pytest.approx(float(total / hits) if hits else 0)
    assert score.num_images == len(images)


def test_labels_count_and_a_true_object_counts_once() -> None:
    box = (0, 0, 10, 10)
    truth: list[list[Object]] = [[("red square", box)], [("digit", box)]]
    predictions: list[list[Object]] = [[("red square", box), ("red square", box)], [("blue circle", box)]]
    score = score_detections(predictions, truth)
    assert (score.precision, score.recall, score.f1) == (1 / 3, 1 / 2, 2 / 5)
    assert (score.mean_iou, score.recall_few, score.recall_many, score.num_images) == (1.0, 0.5, 0.0, 2)


def test_averages_over_objects_not_over_images() -> None:
    box = (0, 0, 10, 10)
    truth: list[list[Object]] = [[("a", box)], [("a", (i * 20, 0, i * 20 + 10, 10)) for i in range(3)]]
    assert score_detections([[("a", box)], []], truth).recall == 1 / 4


def test_refuses_different_numbers_of_images() -> None:
    with pytest.raises(ValueError, match="1 of 0"):
        score_detections([[]], [])


NUM_SCENES = 6


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "held_out", SceneKind.SHAPES, NUM_SCENES, Split.HELD_OUT, 3)


def _scenes() -> list[Scene]:
    return [make_scene(SceneKind.SHAPES, scene_seed(Split.HELD_OUT, i, stream=3)) for i in range(NUM_SCENES)]


def test_the_truth_is_the_scenes_own_and_requests_do_not_hold_it(rows: Path) -> None:
    requests, truth = scoring.read_ground_truth(rows)
    scenes = _scenes()
    assert [list(objects) for objects in truth] == [list(scene.objects) for scene in scenes]
    assert all([message["role"] for message in request["messages"]] == ["user"] for request in requests)


def test_an_answer_that_tells_the_truth_scores_one(rows: Path) -> None:
    _, truth = scoring.read_ground_truth(rows)
    answers = [scoring.parse_answer(answer_text(objects)) for objects in truth]
    assert score_detections(answers, truth).f1 == 1.0


def test_what_is_malformed_counts_as_not_said() -> None:
    text = '[{"bbox_2d": [9, 2, 3, 4], "label": "a"}, {"bbox_2d": [1, 2, 3, 4], "label": "b"}]'
    assert scoring.parse_answer(text) == [("b", (1, 2, 3, 4))]
    for text in ("", "[", "3", "[1]", '[{"label": "digit"}]', '[{"label": "a", "bbox_2d": [1]}]'):
        assert scoring.parse_answer(text) == []


def _plain_answer(stage1: Stage1, scene: Scene) -> str:
    """Greedy, by Hugging Face alone."""
    content = [{"type": "image"}, {"type": "text", "text": PROMPT.removeprefix("<image>")}]
    prompt = stage1.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = stage1.processor(text=[prompt], images=[scene.image], return_tensors="pt")
    output = stage1.model.generate(**inputs, max_new_tokens=scoring.MAX_NEW_TOKENS, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    text: str = stage1.processor.tokenizer.decode(answer, skip_special_tokens=True)
    return text


def test_the_command_scores_every_checkpoint_as_plain_generation_does(
    rows: Path, tmp_path: Path, stage1_directory: Path, stage1: Stage1
) -> None:
    """ms-swift's engine and template against Hugging Face's generate on the same scenes."""
    out = tmp_path / "scores.json"
    files = ["--rows", rows, "--out", out, stage1_directory, stage1_directory]
    assert scoring.main(list(map(str, files))) == 0
    scenes = _scenes()
    answers = [scoring.parse_answer(_plain_answer(stage1, scene)) for scene in scenes]
    expected = score_detections(answers, [scene.objects for scene in scenes])
    assert expected.f1 > 0
    found = json.loads(out.read_text())
    assert found == [found[0]] * 2
    counted = ("precision", "recall", "f1", "mean_iou", "num_images")
    assert {name: found[0][name] for name in counted} == {name: asdict(expected)[name] for name in counted}
    assert 0 < found[0]["ap"] <= found[0]["precision"]
    assert min(found[0]["recall_few"], found[0]["recall_many"]) <= expected.recall <= 1


def test_scores_appear_whole_or_not_at_all(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    with pytest.raises(Exception, match="nowhere"):
        scoring.main(["--rows", str(rows), "--out", str(out), str(tmp_path / "nowhere")])
    assert not out.exists()


def test_rows_are_read_as_any_grounding_data_set(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "images": ["i.png"],
        "objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]},
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    requests, truth = scoring.read_ground_truth(path)
    assert requests == [{"messages": [{"role": "user", "content": "q"}], "images": ["i.png"]}]
    assert truth == [[("cat", (1, 2, 3, 4))]]
