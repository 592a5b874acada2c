"""COCO out: an imported file comes back as it was, and pycocotools reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_sources import SIZE, Importer, annotation, draw, write_coco
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO

from swift_stage2.data import export_command, import_command
from swift_stage2.data.prediction import LabelledBoxes, Prediction, write_predictions
from swift_stage2.errors import UserError


def export(rows: Path, *options: str) -> Any:
    output = rows.with_name("out.json")
    assert export_command.main(["coco", str(rows), "--output", str(output), "--force", *options]) == 0
    return json.loads(output.read_text(encoding="utf-8"))


def by_name(coco: dict[str, Any]) -> dict[str, list[tuple[str, list[float]]]]:
    """Labels and boxes of every image, whatever its id."""
    names = {image["id"]: image["file_name"] for image in coco["images"]}
    labels = {category["id"]: category["name"] for category in coco["categories"]}
    found: dict[str, list[tuple[str, list[float]]]] = {name: [] for name in names.values()}
    for each in coco["annotations"]:
        found[names[each["image_id"]]].append((labels[each["category_id"]], each["bbox"]))
    return found


EDGES = st.integers(0, 6400).map(lambda hundredths: hundredths / 100)


@given(st.lists(st.tuples(EDGES, EDGES, EDGES, EDGES), max_size=8, unique=True))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_boxes_that_lie_inside_come_back(
    tmp_path: Path, drawn: list[tuple[float, float, float, float]]
) -> None:
    boxes = [
        [x, y, width, height]
        for x, y, width, height in drawn
        if width
        and height
        and x + width <= SIZE[0]
        and y + height <= SIZE[1]
        and max(x + width, y + height) > 1
    ]
    source = write_coco(tmp_path, [annotation(n, bbox=box) for n, box in enumerate(boxes)])
    rows = tmp_path / "train.jsonl"
    folder = ["--images", str(tmp_path / "images")]
    import_command.main(["coco", str(source), *folder, "--output", str(rows), "--force"])
    assert by_name(export(rows, *folder)) == {"a.png": [("cat", box) for box in boxes]}


def test_names_labels_and_sizes_come_back_and_pycocotools_reads_them(
    tmp_path: Path, run_import: Importer
) -> None:
    names = ["b/z.png", "a.png", "c.png"]
    for name in names:
        draw(tmp_path / "images" / name)
    images = [{"id": f"i{n}", "file_name": name, "width": 64, "height": 48} for n, name in enumerate(names)]
    objects = [
        annotation(1, "i1", category_id=7),
        annotation(2, "i0"),
        annotation(3, "i1", bbox=[0, 0, 64, 48]),
    ]
    source = write_coco(tmp_path, objects, images)
    rows = run_import("coco", source)
    back = export(rows.path, "--images", str(tmp_path / "images"))
    assert by_name(back) == by_name(json.loads(source.read_text()))
    assert [image["file_name"] for image in back["images"]] == names
    read = COCO(str(rows.path.with_name("out.json")))
    assert [read.loadImgs(key)[0]["width"] for key in read.getImgIds()] == [64] * 3
    assert [each["area"] for each in read.loadAnns(read.getAnnIds())] == [200, 200, 64 * 48]
    assert len(read.getCatIds()) == 2


def test_rows_of_one_image_are_one_image_again(tmp_path: Path, run_import: Importer) -> None:
    source = write_coco(
        tmp_path, [annotation(1), annotation(2, category_id=7), annotation(3, bbox=[0, 0, 3, 4])]
    )
    rows = run_import("coco", source)
    (row,) = rows.rows
    labels, boxes = row["objects"]["ref"], row["objects"]["bbox"]
    parts = [{**row, "objects": {"ref": labels[n::2], "bbox": boxes[n::2]}} for n in range(2)]
    rows.path.write_text("".join(json.dumps(part) + "\n" for part in parts))
    back = export(rows.path, "--images", str(tmp_path / "images"))
    assert len(back["images"]) == 1
    assert sorted(by_name(back)["a.png"]) == sorted(by_name(json.loads(source.read_text()))["a.png"])


def test_scores_of_what_evaluate_writes_are_kept(tmp_path: Path) -> None:
    predictions = tmp_path / "predictions.jsonl"
    objects = LabelledBoxes(("messages",), ((30, 5, 39, 14),))  # as a row has a key
    line = Prediction(image="a.png", width=64, height=48, objects=objects, scores=(0.25,))
    write_predictions(predictions, [line])
    (one,) = export(predictions)["annotations"]
    assert one == {
        "id": 1,
        "image_id": 1,
        "category_id": 1,
        "area": 81,
        "iscrowd": 0,
        "score": 0.25,
        "bbox": [30, 5, 9, 9],
    }


ROW = {"messages": [{"role": "assistant", "content": "[]"}], "images": ["gone.png"]}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("no json", "the line: Invalid JSON"),
        ("{}", "image: Field required"),
        ({"objects": {"ref": ["a"], "bbox": [[3, 2, 1, 4]]}}, "x1 <= x2"),
        ({"objects": {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}, "scores": [None]}, r"scores\.0: "),
        ({**ROW, "objects": {"ref": [], "bbox": []}}, "a picture that can be read"),
        ({**ROW, "objects": {"ref": ["a"], "bbox": [[1, 2, 3, 4]], "bbox_type": "norm1"}}, "in pixels"),
        ("", "must hold lines"),
    ],
)
def test_a_line_that_is_none_is_refused_with_its_place_and_nothing_is_left(
    tmp_path: Path, line: Any, told: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    whole = {"image": "a.png", "width": 64, "height": 48, "objects": {}}
    rows.write_text(
        line if isinstance(line, str) else json.dumps(line if "messages" in line else whole | line)
    )
    with pytest.raises(UserError, match=told) as refused:
        export(rows)
    assert not line or f"{rows}:1" in str(refused.value)
    assert list(tmp_path.iterdir()) == [rows]


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text := '{"image": "b.png", "width": 1, "height": 1, "objects": {}}')
    with pytest.raises(UserError, match="that is read"):
        export_command.main(["coco", str(rows), "--output", str(rows), "--force"])
    assert rows.read_text() == text
