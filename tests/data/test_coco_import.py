"""COCO in: each issue of a file is handled, counted and told, and ``data check`` finds no fault in the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn_sources import CATEGORIES, SIZE, Importer, annotation, draw, write_coco

from swift_stage2.data import check_command, import_command
from swift_stage2.data.fault import Rule
from swift_stage2.data.import_report import ImportIssue
from swift_stage2.errors import UserError


def picture_of(number: int, name: str, **members: Any) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1], **members}


def test_boxes_become_corners_and_no_float_is_smeared(tmp_path: Path, run_import: Importer) -> None:
    source = write_coco(tmp_path, [annotation(1, bbox=[0.1, 2, 0.2, 3.5]), annotation(2, category_id=7)])
    found = run_import("coco", source)
    assert found.of("a.png") == [("cat", [0.1, 2, 0.3, 5.5]), ("dog", [1, 2, 11, 22])]
    assert "[0.1, 2, 0.3, 5.5]" in found.path.read_text()
    assert found.rows[0]["messages"][0]["content"] == "<image>Detect all objects."
    assert found.counts() == {}
    assert "1 rows with 2 objects" in found.told


ODD_OBJECTS: list[tuple[ImportIssue, dict[str, Any], list[float] | None]] = [
    (ImportIssue.CROWD, {"iscrowd": 1, "segmentation": []}, None),
    (
        ImportIssue.MASK,
        {"bbox": None, "segmentation": [[5, 6, 9, 6, 9, 30], [1, 8, 2, 9, 3, 10]]},
        [1, 6, 9, 30],
    ),
    (ImportIssue.NO_BOX, {"bbox": [1, 2, 3], "segmentation": {"size": [48, 64], "counts": "no mask"}}, None),
    (ImportIssue.NO_BOX, {"bbox": [1, 2, float("nan"), 3]}, None),
    (ImportIssue.NO_BOX, {"bbox": [1, 2, 10**400, 3]}, None),
    (ImportIssue.NO_BOX, {"bbox": ["one", 2, 3, 4], "segmentation": [[1, 2, 3]]}, None),
    (ImportIssue.NO_CLASS, {"category_id": 4}, None),
    (ImportIssue.NO_IMAGE, {"image_id": 99}, None),
    (ImportIssue.CLIPPED, {"bbox": [-3, 40, 10, 10]}, [0, 40, 7, 48]),
    (ImportIssue.OUTSIDE, {"bbox": [64, 2, 5, 5]}, None),
    (ImportIssue.OUTSIDE, {"bbox": [-9, -9, 9, 9]}, None),
    (ImportIssue.FLAT, {"bbox": [5, 5, 0, 9]}, None),
    (ImportIssue.SWAPPED, {"bbox": [14, 5, -9, 2]}, [5, 5, 14, 7]),
    (ImportIssue.BAD_FLAG, {"iscrowd": "maybe"}, None),
    (ImportIssue.BROKEN_ENTRY, {"category_id": None}, None),
    (ImportIssue.FLAT, {"bbox": [5, 5, 1e-300, 2]}, None),
]


@pytest.mark.parametrize(("issue", "members", "box"), ODD_OBJECTS)
def test_an_odd_object_is_counted_and_handled(
    tmp_path: Path, run_import: Importer, issue: ImportIssue, members: dict[str, Any], box: list[float] | None
) -> None:
    source = write_coco(tmp_path, [annotation(1, **members), annotation(2, category_id=7)])
    found = run_import("coco", source)
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", [1, 2, 11, 22])]
    assert found.counts() == {issue.found: 1}


def test_a_file_of_crowds_alone_or_of_no_objects(tmp_path: Path, run_import: Importer) -> None:
    assert run_import("coco", write_coco(tmp_path)).counts() == {ImportIssue.EMPTY.found: 1}
    with pytest.raises(UserError, match=r"must give objects, got none of 1: .*crowd \(iscrowd\): 1"):
        run_import("coco", write_coco(tmp_path, [annotation(1, iscrowd=1)]))


def test_ids_that_are_used_twice(tmp_path: Path, run_import: Importer) -> None:
    for name in ("a.png", "b.png", "c.png", "d.png"):
        draw(tmp_path / "images" / name)
    images = [picture_of(1, "a.png"), picture_of(1, "a.png"), picture_of(2, "a.png")]
    images += [picture_of(3, "b.png"), picture_of(3, "c.png"), picture_of(4, "d.png")]
    annotations = [annotation(1), annotation(1), annotation(1, bbox=[4, 4, 4, 4])]
    annotations += [annotation(5, 2, category_id=7), annotation(6, 3), annotation(7, 4)]
    found = run_import("coco", write_coco(tmp_path, annotations, images))
    assert found.names == ["a.png", "d.png"]  # whose the boxes of image 3 are nobody can say
    assert found.of("a.png") == [("cat", [1, 2, 11, 22]), ("cat", [4, 4, 8, 8]), ("dog", [1, 2, 11, 22])]
    assert found.counts() == {
        ImportIssue.ID_OF_TWO.found: 1,
        ImportIssue.LISTED_TWICE.found: 2,
        ImportIssue.ID_TWICE.found: 1,
        ImportIssue.REPEATED.found: 1,
    }


def test_pictures_that_are_odd(tmp_path: Path, run_import: Importer) -> None:
    folder = tmp_path / "images"
    draw(folder / "a.png")
    draw(folder / "empty.png")
    draw(folder / "large.png", size=(128, 96))
    whole = draw(folder / "cut.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:-30])
    latin = os.fsencode(folder) + b"/caf\xe9.png"
    Path(os.fsdecode(latin)).write_bytes(whole)
    names = [
        "a.png",
        "empty.png",
        "large.png",
        "cut.png",
        os.fsdecode(b"caf\xe9.png"),
        "gone.png",
        "no\0name.png",
    ]
    images = [picture_of(number, name) for number, name in enumerate(names)]
    found = run_import("coco", write_coco(tmp_path, [annotation(n, n) for n in (0, 2, 3, 4, 5)], images))
    assert found.names == ["a.png", "empty.png", "large.png"]
    assert found.of("empty.png") == []
    assert found.rows[1]["messages"][1]["content"] == "[]"
    assert found.counts() == {
        ImportIssue.NO_PICTURE.found: 2,
        ImportIssue.UNREADABLE.found: 1,
        ImportIssue.NOT_UTF8.found: 1,
        ImportIssue.EMPTY.found: 1,
        ImportIssue.SIZE.found: 1,
    }


def test_a_turned_picture_is_taken_as_it_is_stored_where_that_is_said(
    tmp_path: Path, run_import: Importer
) -> None:
    draw(tmp_path / "images" / "a.jpg", orientation=6)
    upright = {"width": SIZE[1], "height": SIZE[0]}
    source = write_coco(tmp_path, [annotation(1, bbox=[1, 2, 10, 60])], [picture_of(1, "a.jpg", **upright)])
    found = run_import("coco", source, "--boxes-on", "stored", advice={Rule.ROTATED: 1})
    assert found.of("a.jpg") == [("cat", [1, 2, 11, 48])]
    assert found.counts() == {
        ImportIssue.ROTATED.found: 1,
        ImportIssue.UPRIGHT.found: 1,
        ImportIssue.CLIPPED.found: 1,
    }


def test_a_turned_picture_is_asked_about(tmp_path: Path) -> None:
    draw(tmp_path / "images" / "a.jpg", orientation=6)
    source = write_coco(tmp_path, [annotation(1)], [picture_of(1, "a.jpg")])
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match=r"write --boxes-on stored if .* mogrify"):
        import_command.main(
            ["coco", str(source), "--images", str(tmp_path / "images"), "--output", str(rows)]
        )
    assert not rows.exists()


def test_rows_can_be_read_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_coco(tmp_path, [annotation(1)], categories=[{"id": 3, "name": 'a 5" cat'}])
    monkeypatch.chdir(tmp_path)
    assert import_command.main(["coco", source.name, "--images", "images", "--output", "rows.jsonl"]) == 0
    assert """a 5" cat → a 5' cat""" in capsys.readouterr().out
    monkeypatch.chdir("/")
    assert check_command.main(["check", str(tmp_path / "rows.jsonl")]) == 0


REFUSED = [
    ([], "SOURCE must be COCO's JSON"),
    ({"annotations": [], "categories": []}, "list images"),
    ({"images": [{"id": 1}], "annotations": []}, "list images with file_name and id"),
    (
        {"images": [picture_of(1, "a.png")], "annotations": [{"id": 1, "caption": "a cat"}]},
        "entry without its id, name, image or class: 1",
    ),
    ({"images": [picture_of(1, "a.png")], "annotations": [annotation(1)]}, "object of an unknown class: 1"),
    (
        {"images": [picture_of(1, "gone.png")], "annotations": [], "categories": CATEGORIES},
        r"picture that is not there: 1 \(first .*images\[0\]: gone",
    ),
    (
        {"images": [picture_of(1, "a.png")], "categories": CATEGORIES},
        r"list annotations, got categories, images in .*coco\.json; name the file with the annotations",
    ),
    ({"images": [picture_of(1, "a.png")], "annotations": None}, "list annotations, got images in"),
]


@pytest.mark.parametrize(("content", "told"), REFUSED)
def test_a_file_that_is_none_is_refused_and_nothing_is_left(
    tmp_path: Path, run_import: Importer, content: Any, told: str
) -> None:
    draw(tmp_path / "images" / "a.png")
    source = tmp_path / "coco.json"
    source.write_text(json.dumps(content))
    with pytest.raises(UserError, match=told):
        run_import("coco", source)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda text: text[:200], r"line \d+, column \d+"),
        (lambda text: text + "\n]", "line 2, column 1"),
        (lambda text: text[:-1] + ",}", "a comma stands before it"),
        (lambda text: text[:-1] + ', "annotations": []}', "has 'annotations' twice"),
        (lambda text: "[" * 100_000, "recursion"),
        (lambda text: text.encode("latin-1"), "no UTF-8 text"),
        (lambda text: text.encode("utf-16-le"), "zero bytes"),
    ],
)
def test_a_file_that_is_no_json_is_refused_with_the_place(
    tmp_path: Path, run_import: Importer, spoil: Callable[[str], str | bytes], told: str
) -> None:
    source = write_coco(tmp_path, [annotation(1)], categories=[{"id": 3, "name": "café"}])
    spoilt = spoil(json.dumps(json.loads(source.read_text()), ensure_ascii=False))
    source.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    with pytest.raises(UserError, match=told):
        run_import("coco", source)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_say_what_they_are_are_read(
    tmp_path: Path, run_import: Importer, encoding: str
) -> None:
    source = write_coco(tmp_path, [annotation(1)], categories=[{"id": 3, "name": "café"}])
    source.write_bytes(json.dumps(json.loads(source.read_text()), ensure_ascii=False).encode(encoding))
    assert run_import("coco", source).of("a.png") == [("café", [1, 2, 11, 22])]
