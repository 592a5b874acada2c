from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_stage2.demo import evaluation
from swift_stage2.demo.detection_score import score_detections
from swift_stage2.demo.detector import Detector
from swift_stage2.demo.grounding_dataset import answer_text, write_dataset
from swift_stage2.demo.scenes import Scene, SceneKind, Split, make_scene, scene_seed

NUM_SCENES = 6


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "held_out", SceneKind.SHAPES, NUM_SCENES, Split.HELD_OUT, 3)


def _scenes() -> list[Scene]:
    return [make_scene(SceneKind.SHAPES, scene_seed(Split.HELD_OUT, i, stream=3)) for i in range(NUM_SCENES)]


def test_the_truth_is_the_scenes_own_and_requests_do_not_hold_it(rows: Path) -> None:
    requests, truth = evaluation.read_ground_truth(rows)
    scenes = _scenes()
    assert [list(objects) for objects in truth] == [list(scene.objects) for scene in scenes]
    assert all([message["role"] for message in request["messages"]] == ["user"] for request in requests)


def test_an_answer_that_tells_the_truth_scores_one(rows: Path) -> None:
    _, truth = evaluation.read_ground_truth(rows)
    answers = [evaluation.parse_answer(answer_text(objects)) for objects in truth]
    assert score_detections(answers, truth).f1 == 1.0


def test_what_is_malformed_counts_as_not_said() -> None:
    text = '[{"bbox_2d": [9, 2, 3, 4], "label": "a"}, {"bbox_2d": [1, 2, 3, 4], "label": "b"}]'
    assert evaluation.parse_answer(text) == [("b", (1, 2, 3, 4))]


def test_the_command_scores_every_checkpoint_as_plain_generation_does(
    rows: Path, tmp_path: Path, stage1_directory: Path, stage1: Detector
) -> None:
    """ms-swift's engine and template against Hugging Face's generate on the same scenes."""
    out = tmp_path / "scores.json"
    argv = evaluation.evaluation_command(rows, out, (stage1_directory, stage1_directory))
    assert evaluation.main(argv[3:]) == 0
    scenes = _scenes()
    detections = stage1.detect([scene.image for scene in scenes])
    expected = score_detections(detections, [scene.objects for scene in scenes])
    assert evaluation.read_scores(out) == (expected, expected)


def test_scores_appear_whole_or_not_at_all(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    with pytest.raises(Exception, match="nowhere"):
        evaluation.main(["--rows", str(rows), "--out", str(out), str(tmp_path / "nowhere")])
    assert not out.exists()


def test_rows_are_read_as_any_grounding_data_set(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "images": ["i.png"],
        "objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]},
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    requests, truth = evaluation.read_ground_truth(path)
    assert requests == [{"messages": [{"role": "user", "content": "q"}], "images": ["i.png"]}]
    assert truth == [[("cat", (1, 2, 3, 4))]]
