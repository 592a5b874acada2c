"""What evaluations during training leave: rows in pixels, one whole file each, scores, and which of them count."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from real_model import rollout_of

from swift_stage2.channel_b.dialects import OBJECT_LIST, POINT_LIST
from swift_stage2.channel_b.object_scores import ObjectLogProbs
from swift_stage2.channel_b.parsing import read_ground_truth
from swift_stage2.channel_b.preprocessing import ScoredRollout
from swift_stage2.data import recorded
from swift_stage2.data.prediction import LabelledBoxes, as_line, read_predictions, read_rows
from swift_stage2.data.recorded import (
    EvaluationKeeper,
    RecordedRow,
    Scored,
    evaluations_directory,
    read_recorded,
    recorded_row,
    scores_of,
)
from swift_stage2.records import (
    MatchQuality,
    ObjectMatch,
    Sample,
    SampleKey,
    Target,
)
from swift_stage2.scheduling.evaluation_schedule import RunningEvaluation

FIRST = RunningEvaluation(due_step=100, begun_step=104, version=3)
QUESTION = {"role": "user", "content": "<image>find"}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "street.png"
    Image.new("RGB", (200, 100)).save(path)
    return path


def judged(
    *predicted: tuple[str, tuple[int, int, int, int]], space: tuple[int, int] = (1000, 1000), truth: Any = ()
) -> ScoredRollout:
    quality = MatchQuality(len(predicted), len(truth), 0, 0.0, 0, 0)
    return ScoredRollout(Target("", (), (), quality, ObjectMatch(predicted, truth, ())), space)


def answered(row: dict[str, Any], number: int, found: ScoredRollout) -> RecordedRow:
    truth = read_ground_truth(row)
    rollout = rollout_of(Sample(SampleKey(0, 0, number), row, truth), "said", ())
    return recorded_row(number, row, truth, (rollout, found))


def plain(
    number: int, image: str, truth: Sequence[Any], predicted: Sequence[Any], answer: str
) -> RecordedRow:
    def lists(objects: Sequence[Any]) -> LabelledBoxes:
        return LabelledBoxes(tuple(label for label, _ in objects), tuple(box for _, box in objects))

    return RecordedRow(
        image=image,
        width=100,
        height=100,
        objects=lists(predicted),
        answer=answer,
        finish_reason="stop",
        row=number,
        truth=lists(truth),
    )


CAR, DOG = ("car", (0.0, 0.0, 10.0, 10.0)), ("car", (50.0, 50.0, 90.0, 90.0))
ROWS = (plain(0, "a.png", [CAR], [CAR], "[]"), plain(1, "b.png", [DOG], [], "no list"))


def keep(keeper: EvaluationKeeper, evaluation: RunningEvaluation, *parts: Sequence[RecordedRow]) -> Scored:
    keeper.take(evaluation, ["\n".join(map(as_line, part)) for part in parts])
    (scored,) = keeper.close()
    return scored


def test_what_is_not_ready_at_the_end_is_told_once_and_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "_END_S", 0.2)
    stuck = threading.Event()
    monkeypatch.setattr(recorded, "scores_of", lambda *of: {"ap": stuck.wait(60)})
    keeper = EvaluationKeeper(None, OBJECT_LIST)
    for step in (1, 2):
        keeper.take(RunningEvaluation(step, step, step), [as_line(ROWS[0])])
    faults = [(scored.evaluation.begun_step, scored.fault) for scored in keeper.close()]
    assert [step for step, _ in faults] == [1, 2]
    assert all("were not ready 0.2 s after the end of training" in fault for _, fault in faults)
    assert list(keeper.close()) == []
    stuck.set()


# --- one row -----------------------------------------------------------------------------------------


def test_boxes_are_in_pixels_of_the_stored_image(picture: Path) -> None:
    row = {
        "messages": [QUESTION],
        "images": [str(picture)],
        "objects": {"ref": ["car"], "bbox": [[20, 10, 60, 50]]},
    }
    found = answered(row, 7, judged(("car", (100, 100, 305, 500))))
    assert (found.width, found.height, found.row, found.file) == (200, 100, 7, str(picture))
    assert found.objects == LabelledBoxes(("car",), ((20.0, 10.0, 61.0, 50.0),))
    assert found.truth == LabelledBoxes(("car",), ((20.0, 10.0, 60.0, 50.0),))
    assert (found.answer, found.finish_reason) == ("said", "stop")


def test_shares_of_the_image_are_told_in_pixels_and_an_image_in_the_row_has_no_name(picture: Path) -> None:
    row = {
        "messages": [QUESTION],
        "images": [{"bytes": picture.read_bytes(), "path": None}],
        "objects": {"ref": ["car"], "bbox": [[0.25, 0.5, 0.5, 1.0]], "bbox_type": "norm1"},
    }
    found = answered(row, 0, judged())
    assert found.truth == LabelledBoxes(("car",), ((50.0, 50.0, 100.0, 100.0),))
    assert (found.image, found.file, found.width) == ("", None, 200)


def test_a_row_that_failed_has_its_truth_and_no_answer() -> None:
    row = {
        "messages": [QUESTION],
        "images": ["/nowhere.png"],
        "objects": {"ref": ["car"], "bbox": [[1, 2, 3, 4]]},
    }
    found = recorded_row(2, row, read_ground_truth(row))
    assert (found.finish_reason, found.answer, found.objects) == ("failed", None, LabelledBoxes())
    assert found.truth == LabelledBoxes(("car",), ((1.0, 2.0, 3.0, 4.0),))


def test_points_are_kept_and_have_no_scores_of_boxes(picture: Path) -> None:
    row = {"messages": [QUESTION], "images": [str(picture)], "objects": {"ref": ["car"], "bbox": [[20, 10]]}}
    truth = read_ground_truth(row, 2)
    match = ObjectMatch((("car", (500, 500)),), (("car", (100, 100)),), ((0, 0, 0.5),))
    found = ScoredRollout(Target("", (), (), MatchQuality(1, 1, 1, 0.5, 0, 0), match), (1000, 1000))
    answer = rollout_of(Sample(SampleKey(0, 0, 7), row, truth), "said", ()), found
    told = recorded_row(7, row, truth, answer)
    assert told.objects == LabelledBoxes(("car",), ((100.0, 50.0),))
    assert told.truth == LabelledBoxes(("car",), ((20.0, 10.0),))
    assert scores_of([told], POINT_LIST) == {}


# --- one evaluation ----------------------------------------------------------------------------------


def test_all_ranks_rows_are_in_one_file_that_evaluate_reads(tmp_path: Path) -> None:
    directory = evaluations_directory(tmp_path)
    keep(EvaluationKeeper(directory, OBJECT_LIST), FIRST, [ROWS[1]], [ROWS[0]])
    (file,) = directory.iterdir()
    assert file.name == "step000100.v000003.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["row"], line["due_step"], line["step"], line["version"]) for line in lines] == [
        (0, 100, 104, 3),
        (1, 100, 104, 3),
    ]
    data = [
        {"messages": [QUESTION], "images": [row.image], "objects": {"ref": [], "bbox": []}} for row in ROWS
    ]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    found = read_predictions(file, read_rows(tmp_path / "val.jsonl"))
    assert [each and each.objects for each in found] == [row.objects for row in ROWS]
    assert tuple(read_recorded(file)) == ROWS


def test_scores_are_coco_s_and_those_over_thresholds() -> None:
    scores = keep(EvaluationKeeper(None, OBJECT_LIST), FIRST, ROWS).scores
    # One of two objects, exactly: precision is 1 up to a recall of a half, of which 51 of 101 points are.
    assert scores == {
        **dict.fromkeys(("ap", "ap50", "ap75"), pytest.approx(51 / 101)),
        "ar": pytest.approx(0.5),
        "precision_50_95": pytest.approx(1.0),
        "recall_50_95": pytest.approx(0.5),
        "f1_50_95": pytest.approx(2 / 3),
        "invalid_ratio": 0.5,
        "failed_ratio": 0.0,
    }


def test_objects_have_scores_where_every_answer_has_log_probabilities(tmp_path: Path) -> None:
    """The car is right and sure, the dog is false and half as sure."""
    both = plain(0, "a.png", [CAR], [DOG, CAR], "[]")
    half = ObjectLogProbs((math.log(0.5),), (math.log(0.5),))
    both = replace(both, log_probs=(half, ObjectLogProbs((0.0,), (0.0,))))
    keeper = EvaluationKeeper(tmp_path, OBJECT_LIST)
    scores = keep(keeper, FIRST, [both]).scores
    found = [scores[name] for name in ("ap", "ap_without_scores", "ece")]
    assert found == pytest.approx([1.0, 0.5, 0.25])
    (row,) = read_recorded(next(tmp_path.iterdir()))
    assert row.scores == pytest.approx((0.5, 1.0))
    assert "ece" not in keep(keeper, FIRST, [both, replace(ROWS[0], row=1)]).scores


def test_a_task_without_boxes_has_no_scores() -> None:
    row = RecordedRow(image="a.png", width=1, height=1, objects=LabelledBoxes(), answer="3", row=0)
    scored = keep(EvaluationKeeper(None, OBJECT_LIST), FIRST, [row])
    assert (dict(scored.scores), scored.fault) == ({}, "")


def test_a_disk_that_takes_nothing_costs_the_file_and_not_the_scores(tmp_path: Path) -> None:
    (tmp_path / "evaluations").write_text("no directory")
    scored = keep(EvaluationKeeper(tmp_path / "evaluations", OBJECT_LIST), FIRST, ROWS)
    assert "evaluations" in scored.fault
    assert scored.scores["ar"] == pytest.approx(0.5)


def test_no_line_of_a_rank_spoils_a_run() -> None:
    keeper = EvaluationKeeper(None, OBJECT_LIST)
    keeper.take(FIRST, ["{}"])
    (scored,) = keeper.close()
    assert "ValidationError" in scored.fault
