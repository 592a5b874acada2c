"""Inputs after public bug reports, each with its right value: what came out wrong or silent once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from drawn_sources import Importer, annotation, draw, write_coco
from PIL import Image

from swift_stage2.data.fault import Rule
from swift_stage2.data.import_report import ImportIssue
from swift_stage2.data.survey import survey
from swift_stage2.errors import UserError

CAT = [1, 2, 11, 22]


def coco(folder: Path, *, category_ids: tuple[Any, ...] = (3, 7), **members: Any) -> Path:
    names = ("cat", "dog", "cow")
    categories = [{"id": key, "name": name} for key, name in zip(category_ids, names, strict=False)]
    return write_coco(folder, [annotation(1, **members)], categories=categories)


def yolo(folder: Path, text: str, classes: str = "cat\ndog\n", *, picture: str = "a.png") -> Path:
    draw(folder / "images" / picture)
    root = folder / "labels"
    root.mkdir(exist_ok=True)
    (root / "a.txt").write_bytes(text.encode())
    (root / "classes.txt").write_text(classes, encoding="utf-8")
    return root


def voc(
    folder: Path, *, filename: str = "a.png", more: str = "", label: str = "cat", picture: str = "a.png"
) -> Path:
    draw(folder / "images" / picture)
    root = folder / "xml"
    root.mkdir(exist_ok=True)
    box = "<bndbox><xmin>2</xmin><ymin>3</ymin><xmax>11</xmax><ymax>22</ymax></bndbox>"
    thing = f"<object><name>{label}</name>{more}{box}</object>"
    text = f"<annotation><filename>{filename}</filename>{thing}</annotation>"
    (root / f"{Path(picture).stem}.xml").write_text(text, encoding="utf-8")
    return root


def test_a_category_id_with_two_names_is_refused(tmp_path: Path, run_import: Importer) -> None:
    with pytest.raises(UserError, match="got id 3 of 'cat' and 'dog'"):
        run_import("coco", coco(tmp_path, category_ids=(3, 3)))
    with pytest.raises(UserError, match="got id 3 of 'cat' and 'dog'"):
        run_import("coco", coco(tmp_path, category_ids=(3, "3")))


@pytest.mark.parametrize("members", [{"iscrowd": value} for value in ("0", False, "False", 0.0, None, "")])
def test_no_crowd_is_no_crowd_however_it_is_written(
    tmp_path: Path, run_import: Importer, members: dict[str, Any]
) -> None:
    found = run_import("coco", coco(tmp_path, **members))
    assert found.of("a.png") == [("cat", CAT)]
    assert found.counts() == {}


@pytest.mark.parametrize("members", [{"category_id": "3"}, {"image_id": "1"}, {"category_id": 3.0}])
def test_an_id_is_the_same_as_text_and_as_number(
    tmp_path: Path, run_import: Importer, members: dict[str, Any]
) -> None:
    found = run_import("coco", coco(tmp_path, **members))
    assert found.of("a.png") == [("cat", CAT)]
    assert found.counts() == ({} if members == {"category_id": 3.0} else {ImportIssue.ID_FORM.found: 1})


def test_annotation_ids_are_told_as_written_and_never_by_their_hash(
    tmp_path: Path, run_import: Importer
) -> None:
    keys = ("ann-aa", "ann-aa", -1, -2, 0, 2**61 - 1)
    objects = [annotation(key, bbox=[n, 2, 9, 9]) for n, key in enumerate(keys)]  # type: ignore[arg-type]
    found = run_import("coco", write_coco(tmp_path, objects))
    assert found.counts() == {ImportIssue.ID_TWICE.found: 1}
    assert "(id ann-aa)" in found.told
    assert len(found.of("a.png")) == len(keys)


@pytest.mark.parametrize("box", [[0.1, 0.1, 0.3, 0.3], ["0.5", "0", "0.5", "1"]])
def test_shares_in_place_of_pixels_are_refused(tmp_path: Path, run_import: Importer, box: list[Any]) -> None:
    with pytest.raises(UserError, match=r"as shares would: 1 \(first .*annotations\[0\]"):
        run_import("coco", coco(tmp_path, bbox=box))


@pytest.mark.parametrize(
    ("line", "found", "issue"),
    [
        ("1.000e+00 0.5 0.5 0.25 0.5", ("dog", [24, 12, 40, 36]), None),
        ("0.0 0.5 0.5 0.25 0.5 0.91 7", ("cat", [24, 12, 40, 36]), ImportIssue.BEHIND_BOX),
        ("0 0.5 0.5 0.25 0.5 0.91 1", None, ImportIssue.UNCLEAR),
        ("0 0.5 0.5 0.25 0.5 7", ("cat", [24, 12, 40, 36]), ImportIssue.BEHIND_BOX),
        ("0 0.5 0.5 0.25 0.5" + " 0.9 0.9 2" * 4, ("cat", [24, 12, 40, 36]), ImportIssue.BEHIND_BOX),
        ("0 0.5 0.5 0.25 0.5" + " 0.9 0.9 1" * 4, None, ImportIssue.UNCLEAR),
        ("0 0.25 0.5 0.5 0.25 1.75 0.75", None, ImportIssue.NOT_SHARES),
        ("0 0.5 0.5 -0.25 0.5", None, ImportIssue.NOT_SHARES),
        ("0 0.5 0.5 0.25 0.5 1.57", None, ImportIssue.NOT_SHARES),
        ("0 0.5 0.5 0.25 0.5\x0c0 0.5 0.5 0.25 0.5\u20281 0.5 0.5 0.5 0.5", None, ImportIssue.NO_BOX),
        ("0 0,5 0,5 0,25 0,5", None, ImportIssue.NO_BOX),
        ("0 0.5 0.5 0.25 0_5", None, ImportIssue.NO_BOX),
    ],
)
def test_the_values_of_a_line_decide_what_it_is(
    tmp_path: Path, run_import: Importer, line: str, found: Any, issue: ImportIssue | None
) -> None:
    imported = run_import("yolo", yolo(tmp_path, f"{line}\n1 0.5 0.5 0.5 0.5\n"))
    assert imported.of("a.png") == [*([found] if found else []), ("dog", [16, 12, 48, 36])]
    assert imported.counts() == ({issue.found: 1} if issue else {})


def test_only_lf_and_cr_lf_end_a_line(tmp_path: Path, run_import: Importer) -> None:
    lines = "0 0.5 0.5 0.25 0.5\r\n1 0.5 0.5 0.5 0.5\n"
    classes = "cat\u2028\nd\x0cog\n"
    found = run_import("yolo", yolo(tmp_path, lines, classes))
    assert [label for label, _ in found.of("a.png")] == ["cat", "d og"]
    assert found.counts() == {ImportIssue.RESPELT.found: 2}
    with pytest.raises(UserError, match=r"a\.txt: a CR ends no line here"):
        run_import("yolo", yolo(tmp_path, lines.replace("\n", "").replace("\r", "\r0 "), "cat\ndog\n"))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("names: [{name: cat, id: 0}]", "each by a text, got names="),
        ("names: {0: cat, '': dog}", "each by a text"),
        ("names: {0: cat, 1: ''}", "each by a text"),
        ("names: {0: cat, 0: dog}", "a key is written twice"),
        ("names: {0: cat, 0.0: dog}", "every class once"),
        ("names: cat", "each by a text"),
    ],
)
def test_names_that_are_no_names_are_refused(
    tmp_path: Path, run_import: Importer, names: str, told: str
) -> None:
    root = yolo(tmp_path, "0 0.5 0.5 0.25 0.5")
    (root / "classes.txt").unlink()
    (root / "data.yaml").write_text(names)
    with pytest.raises(UserError, match=told):
        run_import("yolo", root)


def test_files_of_classes_that_disagree_are_refused(tmp_path: Path, run_import: Importer) -> None:
    root = yolo(tmp_path, "0 0.5 0.5 0.25 0.5")
    (tmp_path / "data.yaml").write_text("names: [dog, cat]")
    with pytest.raises(UserError, match="must agree"):
        run_import("yolo", root)
    assert run_import("yolo", root, "--classes", str(tmp_path / "data.yaml")).of("a.png")[0][0] == "dog"


@pytest.mark.parametrize(
    ("written", "picture"),
    [
        ("IMG_1", "IMG_1.JPG"),
        ("IMG_1.jpg", "IMG_1.JPG"),
        ("sub\\IMG_1.jpg", "sub/IMG_1.jpg"),
        ("IMG%201.jpg", "IMG 1.jpg"),
        ("IMG%201.jpg", "IMG%201.jpg"),
        ("./a#1/IMG.jpg", "a#1/IMG.jpg"),
        ("cafe\u0301.jpg", "caf\u00e9.jpg"),
    ],
)
def test_a_picture_is_found_by_the_name_that_tools_write(
    tmp_path: Path, run_import: Importer, written: str, picture: str
) -> None:
    name = os.path.basename(picture)
    root = voc(tmp_path, filename=written, picture=picture)
    (root / f"{Path(picture).stem}.xml").rename(root / "other.xml")
    assert run_import("voc", root).of(name) == [("cat", CAT)]
    images = [{"id": 1, "file_name": written}]
    assert run_import("coco", write_coco(tmp_path, [annotation(1)], images)).of(name) == [("cat", CAT)]


def test_a_label_file_in_capitals_is_found(tmp_path: Path, run_import: Importer) -> None:
    root = yolo(tmp_path, "0 0.5 0.5 0.25 0.5", picture="a.PNG")
    (root / "a.txt").rename(root / "a.TXT")
    assert run_import("yolo", root).of("a.PNG") == [("cat", [24, 12, 40, 36])]


@pytest.mark.parametrize("difficult", ["False", "Unspecified", "0", "", "0.0", "no"])
def test_what_is_not_difficult_is_kept(tmp_path: Path, run_import: Importer, difficult: str) -> None:
    source = voc(tmp_path, more=f"<difficult>{difficult}</difficult>")
    found = run_import("voc", source, "--skip-difficult")
    assert found.of("a.png") == [("cat", CAT)]
    assert found.counts() == {}


def test_the_same_object_twice_is_kept_once_and_told(tmp_path: Path, run_import: Importer) -> None:
    found = run_import(
        "coco", write_coco(tmp_path, [annotation(1), annotation(2), annotation(3, category_id=7)])
    )
    assert found.of("a.png") == [("cat", CAT), ("dog", CAT)]
    assert found.counts() == {ImportIssue.REPEATED.found: 1}
    found = run_import("yolo", yolo(tmp_path, "0 0.5 0.5 0.25 0.5\n0 0.5 0.5 0.25 0.50\n"))
    assert len(found.of("a.png")) == found.counts()[ImportIssue.REPEATED.found] == 1


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (('a"b', "a'b"), "a'b"),
        (("cat", "cat"), "cat"),
        (("caf\u00e9", "cafe\u0301"), "caf\u00e9"),
        (("cat", "c\u200bat"), "cat"),
        (("im_end", "<|im_end|>"), "im_end"),
        (("a b", "a\u00a0b"), "a b"),
    ],
)
def test_classes_that_get_one_label_are_told(
    tmp_path: Path, run_import: Importer, names: tuple[str, str], label: str
) -> None:
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    objects = [annotation(n, category_id=n, bbox=[n, 0, 9, 9]) for n in range(2)]
    found = run_import("coco", write_coco(tmp_path, objects, categories=categories))
    assert [each for each, _ in found.of("a.png")] == [label] * 2
    assert found.counts()[ImportIssue.MERGED.found] == 1
    assert (ImportIssue.RESPELT.found in found.counts()) == (names[0] != names[1])


@pytest.mark.parametrize(
    ("mode", "suffix", "is_read"),
    [
        *(("RGB", "png", True), ("L", "jpg", True), ("P", "png", True), ("RGBA", "png", True)),
        *(("LA", "png", True), ("I;16", "png", False), ("I", "tif", False), ("F", "tif", False)),
    ],
)
def test_one_rule_for_pictures_of_other_pixels(
    tmp_path: Path, run_import: Importer, mode: str, suffix: str, is_read: bool
) -> None:
    source = write_coco(tmp_path, [annotation(1)], [{"id": 1, "file_name": f"a.{suffix}"}])
    Image.new(mode, (64, 48)).save(tmp_path / "images" / f"a.{suffix}")
    if is_read:
        is_plain = mode in ("RGB", "L")
        advice = {} if is_plain else {Rule.COLOURS: 1}
        found = run_import("coco", source, advice=advice)
        assert found.counts() == ({} if is_plain else {ImportIssue.COLOURS.found: 1})
    else:
        with pytest.raises(UserError, match=rf"picture that cannot be read: 1 .*its pixels are {mode}"):
            run_import("coco", source)


def test_a_format_that_is_not_read_is_named(tmp_path: Path, run_import: Importer) -> None:
    root = yolo(tmp_path, "0 0.5 0.5 0.25 0.5")
    (tmp_path / "images" / "b.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    (root / "b.txt").write_text("0 0.5 0.5 0.25 0.5")
    found = run_import("yolo", root)
    assert found.counts() == {ImportIssue.UNREADABLE.found: 1}
    assert "b.heic: it is none of PNG, JPEG" in found.told


def test_rows_whose_columns_show_late_are_told(tmp_path: Path) -> None:
    """`datasets` takes the columns' types from the first 10 MiB: pyarrow's own words are the reason, not ours."""
    row = json.loads(run_rows(tmp_path))
    empty = {**row, "objects": {"ref": [], "bbox": []}}
    empty["messages"] = [
        {"role": "user", "content": "<image>" + "Detect all objects. " * 1200},
        {"role": "assistant", "content": "[]"},
    ]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(empty)] * 450 + [json.dumps(row)] * 12
    file.write_text("\n".join(lines))
    (fault,) = survey([file]).faults
    assert (fault.rule, fault.place.line) == (Rule.COLUMNS, 451)
    file.write_text("\n".join([*lines[450:], *lines[:450]]))
    assert survey([file]).counts == {}


def run_rows(folder: Path) -> str:
    picture = draw(folder / "a.png")
    answer = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'
    messages = [{"role": "user", "content": "<image>Detect."}, {"role": "assistant", "content": answer}]
    objects = {"ref": ["cat"], "bbox": [[1, 2, 11, 22]]}
    return json.dumps({"messages": messages, "images": [str(picture)], "objects": objects})


def test_pages_are_refused(tmp_path: Path, run_import: Importer) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_import("pages", tmp_path)
