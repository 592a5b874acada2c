"""The file of predictions: what is read, which row a line answers, and every line that is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from detection_sets import line, write_lines, write_rows
from PIL import Image

from swift_stage2.channel_b.dialects import OBJECT_LIST, OBJECT_MAP
from swift_stage2.channel_b.object_scores import ObjectLogProbs
from swift_stage2.data.prediction import (
    FAILED,
    LabelledBoxes,
    Prediction,
    answer_dialect,
    answer_flags,
    read_predictions,
    read_rows,
    write_predictions,
)
from swift_stage2.data.scores import detection_data
from swift_stage2.errors import DatasetError

CAR = ("car", (1, 2, 30, 40))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three rows, two of them of one image."""
    return write_rows(tmp_path / "val.jsonl", [("a.png", [CAR]), ("b.png", []), ("a.png", [CAR, CAR])])


def test_lines_answer_rows_by_image_and_lines_of_one_image_in_their_order(data: Path, tmp_path: Path) -> None:
    rows = read_rows(data)
    assert [(row.image, len(row.truth)) for row in rows] == [("a.png", 1), ("b.png", 0), ("a.png", 2)]
    lines = [line("a.png", [], answer="first"), line("a.png", [CAR], answer="second", more={"x": 1})]
    found = read_predictions(write_lines(tmp_path / "p.jsonl", lines), rows)
    assert [each and each.answer for each in found] == ["first", None, "second"]
    assert found[2] is not None
    assert found[2].objects == LabelledBoxes(("car",), ((1.0, 2.0, 30.0, 40.0),))


def test_written_predictions_are_read_again(data: Path, tmp_path: Path) -> None:
    rows, path = read_rows(data), tmp_path / "folder" / "p.jsonl"
    written = [
        Prediction(
            image=row.image,
            width=4,
            height=5,
            objects=LabelledBoxes(("ä",), ((0.0, 0.25, 1.0, 2.0),)),
            scores=(0.5,),
            log_probs=(ObjectLogProbs((-0.25,), (-1.0, 0.0)),),
            answer="\u2028",
            finish_reason="stop",
        )
        for row in rows
    ]
    write_predictions(path, written)
    assert read_predictions(path, rows) == written


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"image": "a.png"}, "width"),
        (line("a.png", [CAR]) | {"width": 0}, "width"),
        (line("a.png", [("car", (1, 2, 3))]), "boxes of four numbers"),
        (line("a.png", [("car", (1, 2))]), "boxes of four numbers"),
        (line("a.png", [("car", (9, 2, 3, 4))]), "x1 <= x2"),
        (line("a.png", [CAR], scores=[0.5, 0.6]), "one score"),
        (line("a.png", [CAR], scores=[]), "one score"),
        (line("a.png", [CAR], log_probs=[]), "one of log_probs"),
        (line("a.png", [CAR], log_probs=[{"label": [], "box": [-1]}]), "log_probs.0.label"),
        (line("a.png", [CAR], log_probs=[{"label": [-1], "box": [1]}]), "log_probs.0.box.0"),
        (line("a.png", [("car", (1, 2, 3, 1e308))]), "objects.bbox.0.3"),
        (line("a.png", [CAR]) | {"objects": {"ref": [], "bbox": [[1, 2, 3, 4]]}}, "one ref"),
        (line("c.png", []), "no row (left) names"),
        (["no object"], "2"),
    ],
)
def test_a_line_that_is_no_prediction_is_refused_with_its_place(
    data: Path, tmp_path: Path, bad: Any, told: str
) -> None:
    path = write_lines(tmp_path / "p.jsonl", [line("a.png", [CAR]), bad])
    with pytest.raises(DatasetError) as refused:
        read_predictions(path, read_rows(data))
    assert f"{path}:2: " in str(refused.value)
    assert told in str(refused.value)


def test_a_line_of_another_size_than_its_image_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (400, 300)).save(tmp_path / "a.png")
    image = str(tmp_path / "a.png")
    rows = read_rows(write_rows(tmp_path / "val.jsonl", [("absent.png", []), (image, [CAR])]))
    right, wrong = line(image, [CAR]) | {"height": 300}, line(image, [CAR]) | {"width": 300, "height": 400}
    failed = line(image, []) | {"width": 1, "height": 1, "finish_reason": FAILED}
    for good in (right, failed):
        path = write_lines(tmp_path / "p.jsonl", [line("absent.png", []), good])
        assert None not in read_predictions(path, rows)
    path = write_lines(tmp_path / "p.jsonl", [line("absent.png", []), wrong])
    with pytest.raises(DatasetError, match=r":2: .*got 300 x 400 for .*a\.png, which has 400 x 300; write"):
        read_predictions(path, rows)


def test_a_second_answer_and_scores_in_some_lines_only_are_refused(data: Path, tmp_path: Path) -> None:
    rows = read_rows(data)
    with pytest.raises(DatasetError, match=r":2: .*b\.png"):
        read_predictions(write_lines(tmp_path / "p.jsonl", [line("b.png", []), line("b.png", [])]), rows)
    mixed = [line("a.png", [CAR], scores=[0.5]), line("a.png", [CAR])]
    with pytest.raises(DatasetError, match="all lines must have scores"):
        read_predictions(write_lines(tmp_path / "p.jsonl", mixed), rows)
    silent = [line("a.png", [CAR], scores=[0.5]), line("a.png", [])]  # which has nothing to score
    assert read_predictions(write_lines(tmp_path / "p.jsonl", silent), rows)[2] is not None


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"messages": [], "images": ["a.png"], "objects": {"ref": [], "bbox": []}}', "messages and images"),
        ('{"messages": [{}], "objects": {"ref": [], "bbox": []}}', "messages and images"),
        ('{"messages": [{}], "images": ["a.png"]}', "objects"),
        ('{"messages": [{}], "images": ["a.png"], "objects": {"bbox_type": "norm1", "bbox": []}}', "norm1"),
        ('{"messages": {"a": 1}, "images": ["a.png"], "objects": {"bbox": []}}', "list of objects"),
        ('{"messages": [1], "images": ["a.png"], "objects": {"bbox": []}}', "list of objects"),
        (
            '{"messages": [{}], "images": ["a.png"], "objects": {"ref": ["\\ud800"], "bbox": [[1, 2, 3, 4]]}}',
            "surrogates",
        ),
        (
            '{"messages": [{}], "images": ["a.png"], "objects": {"ref": ["a"], "bbox": [[1, 2]]}}',
            "a box must be",
        ),
        ("[" * 100_000, "recursion"),
        ("[1]", "val.jsonl:1"),
        ("{", "val.jsonl:1"),
    ],
)
def test_a_row_that_cannot_be_evaluated_is_refused_with_its_place(
    tmp_path: Path, row: str, told: str
) -> None:
    (tmp_path / "val.jsonl").write_text(row + "\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"val\.jsonl:1") as refused:
        read_rows(tmp_path / "val.jsonl")
    assert told in str(refused.value)


def test_objects_without_scores_count_as_one(data: Path) -> None:
    truths = [row.truth for row in read_rows(data)]
    objects = LabelledBoxes(("a", "b", "c"), ((0.0, 0.0, 1.0, 1.0),) * 3)
    for given, expected in ((None, [1.0, 1.0, 1.0]), ((0.2, 0.9, 0.1), [0.2, 0.9, 0.1])):
        prediction = Prediction(image="a.png", width=9, height=9, objects=objects, scores=given)
        assert detection_data(truths, [None, None, prediction]).predicted.scores.tolist() == expected


def test_answers_are_told_apart_by_how_they_end(data: Path) -> None:
    rows = read_rows(data)
    assert answer_dialect(rows) is OBJECT_LIST
    whole = '[{"bbox_2d": [1, 2, 3, 4], "label": "car"}]'
    answers = [
        (whole, "stop"),
        (whole[:-1], "stop"),
        ("[{}]", "stop"),
        (whole[:-9], "length"),
        ("", "failed"),
    ]
    predictions: list[Prediction | None] = [
        Prediction(
            image="", width=1, height=1, objects=LabelledBoxes(), answer=text or None, finish_reason=end
        )
        for text, end in answers
    ]
    flags = {name: each.tolist() for name, each in answer_flags([*predictions, None], OBJECT_LIST).items()}
    assert flags == {
        "truncated_ratio": [0, 0, 0, 1, 0, 0],
        "failed_ratio": [0, 0, 0, 0, 1, 1],
        "invalid_ratio": [0, 1, 1, 0, 0, 0],
    }
    assert "invalid_ratio" not in answer_flags([None], OBJECT_LIST)  # nobody kept the texts


def test_the_dialect_is_that_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text(
        '{"messages": [{"role": "assistant", "content": "{\\"object_1\\": {\\"desc\\": \\"<ref-object>\\", '
        '\\"bbox_2d\\": <bbox>}}"}], "images": ["a"], "objects": {"ref": ["car"], "bbox": [[1, 2, 3, 4]]}}\n',
        encoding="utf-8",
    )
    assert answer_dialect(read_rows(tmp_path / "val.jsonl")) is OBJECT_MAP
