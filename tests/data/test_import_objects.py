"""Each object of a source is right, or left out and told: a table per format, many of them after public bug reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawn_sources import SIZE, Importer, annotation, thing, write_coco, write_voc, write_yolo

from swift_stage2.data.sources import ImportIssue
from swift_stage2.errors import UserError

WIDTH, HEIGHT = SIZE
DOG = thing((2, 3, 11, 22), label="dog")
BOX, SHARE = [1, 2, 11, 22], [24, 12, 40, 36]


@pytest.mark.parametrize(
    ("members", "issue", "box"),
    [
        ({"bbox": [0.1, 2, 0.2, 3.5]}, None, [0.1, 2, 0.3, 5.5]),
        *(({"iscrowd": value}, None, BOX) for value in ("0", False, "False", 0.0, None, "")),
        ({"iscrowd": 1, "segmentation": []}, ImportIssue.CROWD, None),
        ({"iscrowd": "maybe"}, ImportIssue.BAD_FLAG, None),
        *(
            ({"bbox": box, "segmentation": [[5, 6, 9, 6, 9, 30]]}, ImportIssue.NO_BOX, None)
            for box in (None, [1, 2, 3], [1, 2, float("nan"), 3], [1, 2, 10**400, 3], ["one", 2, 3, 4])
        ),
        ({"category_id": 4}, ImportIssue.NO_CLASS, None),
        ({"category_id": None}, ImportIssue.BROKEN_ENTRY, None),
        ({"image_id": 99}, ImportIssue.NO_IMAGE, None),
        ({"category_id": 3.0}, None, BOX),
        ({"category_id": "3"}, ImportIssue.ID_FORM, BOX),
        ({"image_id": "1"}, ImportIssue.ID_FORM, BOX),
        ({"bbox": [-3, 40, 10, 10]}, ImportIssue.CLIPPED, [0, 40, 7, 48]),
        ({"bbox": [64, 2, 5, 5]}, ImportIssue.OUTSIDE, None),
        ({"bbox": [-9, -9, 9, 9]}, ImportIssue.OUTSIDE, None),
        *(
            ({"bbox": box}, ImportIssue.FLAT, None)
            for box in ([5, 5, 0, 9], [14, 5, -9, 2], [5, 5, 1e-300, 2])
        ),
        ({"category_id": 7}, ImportIssue.REPEATED, None),
    ],
)
def test_an_object_of_coco(
    tmp_path: Path, run_import: Importer, members: dict[str, Any], issue: ImportIssue | None, box: Any
) -> None:
    found = run_import("coco", write_coco(tmp_path, [annotation(1, **members), annotation(2, category_id=7)]))
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", BOX)]
    assert found.counts() == ({issue: 1} if issue else {})


@pytest.mark.parametrize(
    ("line", "issue", "box"),
    [
        ("0 0.5 0.5 0.25 0.5", None, SHARE),
        ("0 0.5 0.5 0.25 0.5 0.9", None, SHARE),
        ("0.000e+00 0.5 0.5 0.25 0.5", None, SHARE),
        ("0 0.25 0.5 0.5 0.25 0.75 0.75", ImportIssue.MASK, [16, 12, 48, 36]),
        ("0 0.9 0.5 0.4 0.5", ImportIssue.CLIPPED, [44.8, 12, 64, 36]),
        ("0 0.5 0.5 0 0.5", ImportIssue.FLAT, None),
        ("2 0.5 0.5 0.5 0.5", ImportIssue.NO_CLASS, None),
        ("cat 0.5 0.5 0.5 0.5", ImportIssue.NO_CLASS, None),
        *((f"0 {text}", ImportIssue.NO_BOX, None) for text in (
            "0.5 0.5 0.5", "0.5 nan 0.5 0.5", "a b c d", "0,5 0,5 0,25 0,5", "0.5 0.5 0.25 0_5",
            "0.5 0.5 0.25 0.5\x0c0 0.5 0.5 0.25 0.5\u20281 0.5 0.5 0.5 0.5",
        )),
        ("0 40 12 20 20", ImportIssue.NOT_SHARES, None),
        *((f"0 0.5 0.5 0.25 0.5{behind}", ImportIssue.NOT_SHARES, None) for behind in (
            " 0.91 7", " 0.91 1", " 7", " 1.57", " 0.9 0.9 2" * 4, " 0.9 0.9 1" * 4,
        )),
        ("0 0.25 0.5 0.5 0.25 1.75 0.75", ImportIssue.NOT_SHARES, None),
        ("0 0.5 0.5 -0.25 0.5", ImportIssue.NOT_SHARES, None),
    ],
)  # fmt: skip
def test_a_line_of_yolo(
    tmp_path: Path, run_import: Importer, line: str, issue: ImportIssue | None, box: list[float] | None
) -> None:
    found = run_import("yolo", write_yolo(tmp_path, {"a": f"{line}\r\n\n1 0.5 0.5 0.25 0.5\n"}))
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", SHARE)]
    assert found.counts() == ({issue: 1} if issue else {})


@pytest.mark.parametrize(
    ("objects", "counts", "box"),
    [
        (thing((1, 1, WIDTH, HEIGHT)), {}, [0, 0, WIDTH, HEIGHT]),
        (thing(("2.5", 3, 11, 22), more="<part/>"), {}, [1.5, 2, 11, 22]),
        *(
            (thing((5, 5, 9, 9), more=f"<difficult>{word}</difficult>"), {}, [4, 4, 9, 9])
            for word in ("False", "Unspecified", "0", "", "0.0", "no")
        ),
        (thing((5, 5, 9, 9), more="<difficult>1</difficult>"), {ImportIssue.DIFFICULT: 1}, None),
        (thing((0, 5, 9, 9)), {ImportIssue.FROM_ZERO: 1, ImportIssue.CLIPPED: 1}, [0, 4, 9, 9]),
        (thing((5, 5, 900, 9)), {ImportIssue.CLIPPED: 1}, [4, 4, WIDTH, 9]),
        (thing((9, 9, 5, 5)), {ImportIssue.FLAT: 1}, None),
        *((thing((1, 2, edge, 3)), {ImportIssue.NO_BOX: 1}, None) for edge in ("x", "nan")),
        ("<object><name>cat</name><polygon/></object>", {ImportIssue.NO_BOX: 1}, None),
        (thing((1, 2, 3, 4), label=" "), {ImportIssue.NO_CLASS: 1}, None),
        (thing((1, 2, 3, 4)).replace("<name>cat</name>", ""), {ImportIssue.NO_CLASS: 1}, None),
    ],
)
def test_an_object_of_voc(
    tmp_path: Path, run_import: Importer, objects: str, counts: dict[ImportIssue, int], box: Any
) -> None:
    found = run_import("voc", write_voc(tmp_path, objects + DOG), "--skip-difficult")
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", [1, 2, 11, 22])]
    assert found.counts() == counts


def test_voc_from_zero_and_with_difficult_objects(tmp_path: Path, run_import: Importer) -> None:
    source = write_voc(tmp_path, thing((0, 1, 9, 9), more="<difficult>1</difficult>"))
    found = run_import("voc", source, "--first-pixel", "0")
    assert (found.of("a.png"), found.counts()) == ([("cat", [0, 1, 9, 9])], {})


def test_key_points_behind_a_box_are_left_out_where_their_number_is_known(
    tmp_path: Path, run_import: Importer
) -> None:
    root = write_yolo(tmp_path, {"a": "0 0.5 0.5 0.25 0.5 0.1 0.1 2 0.9 0.9 2"})
    (root / "data.yaml").write_text("names: [cat]\nkpt_shape: [2, 3]\n")
    assert run_import("yolo", root).of("a.png") == [("cat", SHARE)]


@pytest.mark.parametrize("box", [[0.1, 0.1, 0.3, 0.3], ["0.5", "0", "0.5", "1"]])
def test_shares_in_place_of_pixels_are_refused(tmp_path: Path, run_import: Importer, box: list[Any]) -> None:
    with pytest.raises(UserError, match=r"as shares would: 1 \(first .*annotations\[0\]"):
        run_import("coco", write_coco(tmp_path, [annotation(1, bbox=box)]))


def test_a_file_of_crowds_alone_or_of_no_objects(tmp_path: Path, run_import: Importer) -> None:
    assert run_import("coco", write_coco(tmp_path)).counts() == {ImportIssue.EMPTY: 1}
    with pytest.raises(UserError, match=r"must give objects, got none of 1: .*crowd \(iscrowd\): 1"):
        run_import("coco", write_coco(tmp_path, [annotation(1, iscrowd=1)]))


def test_annotation_ids_are_told_as_written_and_never_by_their_hash(
    tmp_path: Path, run_import: Importer
) -> None:
    keys = ("ann-aa", "ann-aa", -1, -2, 0, 2**61 - 1)
    objects = [annotation(key, bbox=[n, 2, 9, 9]) for n, key in enumerate(keys)]  # type: ignore[arg-type]
    found = run_import("coco", write_coco(tmp_path, objects))
    assert found.counts() == {ImportIssue.ID_TWICE: 1}
    assert "(id ann-aa)" in found.told
    assert len(found.of("a.png")) == len(keys)


@pytest.mark.parametrize("key", [3, "3"])
def test_a_category_id_with_two_names_is_refused(tmp_path: Path, run_import: Importer, key: Any) -> None:
    categories = [{"id": 3, "name": "cat"}, {"id": key, "name": "dog"}]
    with pytest.raises(UserError, match="got id 3 of 'cat' and 'dog'"):
        run_import("coco", write_coco(tmp_path, [annotation(1)], categories=categories))


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
    assert found.counts()[ImportIssue.MERGED] == 1
    assert (ImportIssue.RESPELT in found.counts()) == (names[0] != names[1])
