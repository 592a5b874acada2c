"""YOLO and VOC in: folders of files, each issue handled and told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from drawn_sources import SIZE, Importer, draw

from swift_stage2.data.fault import Rule
from swift_stage2.data.import_report import ImportIssue
from swift_stage2.errors import UserError

WIDTH, HEIGHT = SIZE


def write_yolo(folder: Path, labels: Mapping[str, str], classes: str = "cat\ndog\n") -> Path:
    """A picture for each label file."""
    root = folder / "labels"
    for name, text in labels.items():
        draw(folder / "images" / f"{name}.png")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.txt").write_text(text, encoding="utf-8")
    (root / "classes.txt").write_text(classes, encoding="utf-8")
    return root


def test_yolo_shares_become_pixels(tmp_path: Path, run_import: Importer) -> None:
    source = write_yolo(tmp_path, {"train/a": "1 0.5 0.5 0.25 0.5\n\n0 0.1 0.1 0.2 0.2 0.9\n", "train/b": ""})
    found = run_import("yolo", source)
    assert found.of("a.png") == [("dog", [24, 12, 40, 36]), ("cat", [0, 0, 12.8, 9.6])]
    assert found.of("b.png") == []
    assert found.counts() == {ImportIssue.EMPTY.found: 1}


@pytest.mark.parametrize(
    ("line", "issue", "box"),
    [
        ("0 0.25 0.5 0.5 0.25 0.75 0.75", ImportIssue.MASK, [16, 12, 48, 36]),
        ("0 0.9 0.5 0.4 0.5", ImportIssue.CLIPPED, [44.8, 12, 64, 36]),
        ("0 40 12 20 20", ImportIssue.NOT_SHARES, None),
        ("0 0.5 0.5 0 0.5", ImportIssue.FLAT, None),
        ("0 0.5 0.5 0.5", ImportIssue.NO_BOX, None),
        ("0 0.5 nan 0.5 0.5", ImportIssue.NO_BOX, None),
        ("0 a b c d", ImportIssue.NO_BOX, None),
        ("2 0.5 0.5 0.5 0.5", ImportIssue.NO_CLASS, None),
        ("cat 0.5 0.5 0.5 0.5", ImportIssue.NO_CLASS, None),
    ],
)
def test_an_odd_line_of_yolo(
    tmp_path: Path, run_import: Importer, line: str, issue: ImportIssue, box: list[float] | None
) -> None:
    found = run_import("yolo", write_yolo(tmp_path, {"a": f"{line}\n1 0.5 0.5 0.25 0.5\n"}))
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", [24, 12, 40, 36])]
    assert found.counts() == {issue.found: 1}


def test_files_of_yolo_that_do_not_belong_together(tmp_path: Path, run_import: Importer) -> None:
    source = write_yolo(
        tmp_path,
        dict.fromkeys(("a", "b", "gone", "twice"), "0 0.5 0.5 0.5 0.5") | {"odd": "", "zeros": "\0" * 40},
    )
    (tmp_path / "images" / "gone.png").unlink()
    (source / "odd.txt").write_bytes(b"\xff")
    (source / "twice.TXT").write_text("1 0.5 0.5 0.5 0.5")
    draw(tmp_path / "images" / "unlabelled.png")
    draw(tmp_path / "images" / "b.jpg")
    name = os.fsdecode(b"caf\xe9")
    (source / f"{name}.txt").write_text("0 0.5 0.5 0.5 0.5")
    draw(tmp_path / "images" / f"{name}.png")
    found = run_import("yolo", source)
    assert found.names == ["a.png", "unlabelled.png"]  # b.png has the label file of b.jpg
    assert found.counts() == {
        ImportIssue.NO_PICTURE.found: 1,
        ImportIssue.NOT_UTF8.found: 1,
        ImportIssue.SEVERAL_PICTURES.found: 1,
        ImportIssue.TWO_CLAIMS.found: 1,
        ImportIssue.BROKEN_FILE.found: 2,
        ImportIssue.NO_LABEL_FILE.found: 1,
        ImportIssue.EMPTY.found: 1,
    }


def test_a_turned_picture_of_yolo_has_the_shares_of_its_stored_sides(
    tmp_path: Path, run_import: Importer
) -> None:
    source = write_yolo(tmp_path, {"a": "0 0.5 0.25 0.5 0.5"})
    (tmp_path / "images" / "a.png").unlink()
    draw(tmp_path / "images" / "a.jpg", orientation=8)
    told = {Rule.ROTATED: 1}
    assert run_import("yolo", source, "--boxes-on", "stored", advice=told).of("a.jpg") == [
        ("cat", [16, 0, 48, 24])
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.yaml", "names: [cat, 'no']\n"),
        ("../data.yaml", "path: .\nnames:\n  0: cat\n  1: no\n"),
        ("../../names.yaml", "names: {0: cat, 1: no}"),
    ],
)
def test_classes_of_yolo_are_found_or_named(
    tmp_path: Path, run_import: Importer, name: str, text: str
) -> None:
    root = write_yolo(tmp_path, {"train/a": "1 0.5 0.5 0.5 0.5"})
    (root / "classes.txt").unlink()
    (root / name).write_text(text)
    options = ["--classes", str(root / name)] if "names" in name else []
    assert run_import("yolo", root, *options).of("a.png") == [("no", [16, 12, 48, 36])]


def test_key_points_behind_a_box_are_left_out(tmp_path: Path, run_import: Importer) -> None:
    root = write_yolo(tmp_path, {"a": "0 0.5 0.5 0.5 0.5 0.1 0.1 2 0.9 0.9 2"}, classes="cat")
    (root / "data.yaml").write_text("names: [cat]\nkpt_shape: [2, 3]\n")
    assert run_import("yolo", root).of("a.png") == [("cat", [16, 12, 48, 36])]


def test_yolo_without_classes_or_pictures_is_refused(tmp_path: Path, run_import: Importer) -> None:
    root = write_yolo(tmp_path, {"train/a": "0 0.5 0.5 0.5 0.5"})
    with pytest.raises(UserError, match=r"must hold a label file .*/labels/train/train/a\.txt"):
        run_import("yolo", root / "train", "--classes", str(root / "classes.txt"))
    (root / "classes.txt").write_text("\n")
    with pytest.raises(UserError, match="must name every class"):
        run_import("yolo", root)
    deep = tmp_path / "deep.yaml"
    deep.write_text("names: " + "[" * 5000)
    with pytest.raises(UserError, match="recursion"):
        run_import("yolo", root, "--classes", str(deep))
    (root / "classes.txt").unlink()
    with pytest.raises(UserError, match="name the file with --classes"):
        run_import("yolo", root)
    (tmp_path / "classes.txt").write_text("cat")
    absent = f"SOURCE must be a folder that can be read, got {root}/nowhere: No such file or directory; check"
    for options in ([], ["--classes", str(tmp_path / "classes.txt")]):
        with pytest.raises(UserError, match=absent):
            run_import("yolo", root / "nowhere", *options)
    (tmp_path / "images" / "train" / "a.png").unlink()
    with pytest.raises(UserError, match="--images must be a folder that holds"):
        run_import("yolo", root)


def write_voc(folder: Path, objects: str, name: str = "a", filename: str = "a.png") -> Path:
    draw(folder / "images" / f"{name}.png")
    root = folder / "xml"
    root.mkdir(exist_ok=True)
    size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
    text = f"<annotation><filename>{filename}</filename>{size}{objects}</annotation>"
    (root / f"{name}.xml").write_text(text, encoding="utf-8")
    return root


def thing(box: tuple[object, ...], *, label: str = "cat", more: str = "") -> str:
    edges = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    return f"<object><name>{label}</name>{more}<bndbox>{''.join(f'<{e}>{v}</{e}>' for e, v in edges)}</bndbox></object>"


DOG = thing((2, 3, 11, 22), label="dog")


def test_voc_counts_from_1_and_ends_with_the_last_pixel(tmp_path: Path, run_import: Importer) -> None:
    source = write_voc(tmp_path, thing((1, 1, WIDTH, HEIGHT)) + thing(("2.5", 3, 11, 22), more="<part/>"))
    found = run_import("voc", source)
    assert found.of("a.png") == [("cat", [0, 0, WIDTH, HEIGHT]), ("cat", [1.5, 2, 11, 22])]
    assert found.counts() == {}
    from_zero = run_import("voc", source, "--first-pixel", "0")
    assert from_zero.of("a.png") == [("cat", [1, 1, WIDTH, HEIGHT]), ("cat", [2.5, 3, 11, 22])]


@pytest.mark.parametrize(
    ("objects", "counts", "box"),
    [
        (thing((5, 5, 9, 9), more="<difficult>1</difficult>"), {ImportIssue.DIFFICULT: 1}, [4, 4, 9, 9]),
        (thing((0, 5, 9, 9)), {ImportIssue.FROM_ZERO: 1, ImportIssue.CLIPPED: 1}, [0, 4, 9, 9]),
        (thing((5, 5, 900, 9)), {ImportIssue.CLIPPED: 1}, [4, 4, WIDTH, 9]),
        (thing((9, 9, 5, 5)), {ImportIssue.SWAPPED: 1}, [4, 4, 9, 9]),
        (thing((1, 2, 3, "x")), {ImportIssue.NO_BOX: 1}, None),
        (thing((1, 2, "nan", 3)), {ImportIssue.NO_BOX: 1}, None),
        (thing((1, 2, 3, 4), label=" "), {ImportIssue.NO_LABEL: 1}, None),
        (thing((1, 2, 3, 4)).replace("<name>cat</name>", ""), {ImportIssue.NO_LABEL: 1}, None),
        ("<object><name>cat</name><polygon/></object>", {ImportIssue.NO_BOX: 1}, None),
    ],
)
def test_an_odd_object_of_voc(
    tmp_path: Path,
    run_import: Importer,
    objects: str,
    counts: dict[ImportIssue, int],
    box: list[float] | None,
) -> None:
    found = run_import("voc", write_voc(tmp_path, objects + DOG))
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", [1, 2, 11, 22])]
    assert found.counts() == {issue.found: count for issue, count in counts.items()}


def test_difficult_objects_can_be_dropped(tmp_path: Path, run_import: Importer) -> None:
    source = write_voc(tmp_path, thing((5, 5, 9, 9), more="<difficult>1</difficult>") + DOG)
    write_voc(tmp_path, thing((5, 5, 9, 9)), name="b", filename="b.png")
    found = run_import("voc", source, "--skip-difficult")
    assert found.counts() == {ImportIssue.SKIPPED.found: 1}
    assert [label for label, _ in found.of("a.png")] == ["dog"]
    assert [label for label, _ in found.of("b.png")] == ["cat"]


def test_names_sizes_and_files_of_voc(tmp_path: Path, run_import: Importer) -> None:
    source = write_voc(tmp_path, DOG, filename="C:/elsewhere/000.jpg")  # found by the XML file's own name
    write_voc(tmp_path, DOG, name="b", filename="a.png")  # so that a.png has two
    write_voc(tmp_path, DOG, name="c", filename="c.png")
    write_voc(tmp_path, DOG, name="d", filename="d.png")
    write_voc(tmp_path, DOG, name="f", filename="elsewhere.png")
    (source / "c.xml").write_text("<annotation><filename>")
    (source / "e.xml").write_text('<?xml version="1.0" encoding="nowhere"?><annotation/>')
    draw(tmp_path / "images" / "d.png", size=(99, 99))
    found = run_import("voc", source)
    assert found.names == ["d.png", "f.png"]
    assert found.counts() == {
        ImportIssue.BROKEN_FILE.found: 2,
        ImportIssue.TWO_CLAIMS.found: 1,
        ImportIssue.OTHER_NAME.found: 2,
        ImportIssue.SIZE.found: 1,
    }


def test_other_xml_is_no_annotation_without_objects(tmp_path: Path, run_import: Importer) -> None:
    source = write_voc(tmp_path, DOG, name="b", filename="b.png")
    (source / "a.xml").write_text("<annotations><image name='a.png'/></annotations>")
    found = run_import("voc", source)
    assert found.names == ["b.png"]
    assert "the root must be <annotation>, got <annotations>" in found.told
