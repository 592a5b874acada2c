"""Files and pictures of a source, found by the names that tools write; and the choices of whoever imports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from drawn_sources import (
    CATEGORIES,
    SIZE,
    Importer,
    annotation,
    draw,
    thing,
    write_coco,
    write_voc,
    write_yolo,
)
from PIL import Image

from swift_stage2.data.files import Rule
from swift_stage2.data.sources import ImportIssue
from swift_stage2.data.survey import survey
from swift_stage2.errors import UserError

CAT = thing((2, 3, 11, 22))
HALF = "0 0.5 0.5 0.5 0.5"


def picture_of(number: int, name: str, **members: Any) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1], **members}


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
    root = write_voc(tmp_path, CAT, picture, written)
    (root / f"{Path(picture).stem}.xml").rename(root / "other.xml")
    assert run_import("voc", root).of(name) == [("cat", [1, 2, 11, 22])]
    images = [{"id": 1, "file_name": written}]
    assert run_import("coco", write_coco(tmp_path, [annotation(1)], images)).of(name) == [
        ("cat", [1, 2, 11, 22])
    ]


def test_pictures_that_cannot_be_used(tmp_path: Path, run_import: Importer) -> None:
    folder, latin = tmp_path / "images", os.fsdecode(b"caf\xe9.png")
    for name in ("a.png", "empty.png", latin):
        draw(folder / name)
    draw(folder / "large.png", size=(128, 96))
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:-30])
    (folder / "b.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    Image.new("I;16", SIZE).save(folder / "deep.png")
    names = [
        "a.png",
        "empty.png",
        "large.png",
        "cut.png",
        latin,
        "gone.png",
        "no\0name.png",
        "b.heic",
        "deep.png",
    ]
    images = [picture_of(number, name) for number, name in enumerate(names)]
    found = run_import("coco", write_coco(tmp_path, [annotation(n, n) for n in (0, 2, 3, 4, 5)], images))
    assert found.names == ["a.png", "empty.png", "large.png"]
    assert (found.of("empty.png"), found.rows[1]["messages"][1]["content"]) == ([], "[]")
    assert found.counts() == {
        ImportIssue.NO_PICTURE: 2,
        ImportIssue.UNREADABLE: 4,
        ImportIssue.EMPTY: 1,
        ImportIssue.SIZE: 1,
    }


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
    assert found.counts() == dict.fromkeys(
        (ImportIssue.ID_OF_TWO, ImportIssue.REPEATED, ImportIssue.ID_TWICE), 1
    )


@pytest.mark.parametrize("orientation", [6, 8])
def test_a_turned_picture_is_asked_about_and_taken_as_it_is_stored(
    tmp_path: Path, run_import: Importer, orientation: int
) -> None:
    draw(tmp_path / "images" / "a.jpg", orientation=orientation)
    upright = picture_of(1, "a.jpg", width=SIZE[1], height=SIZE[0])
    source = write_coco(tmp_path, [annotation(1, bbox=[1, 2, 10, 60])], [upright])
    with pytest.raises(UserError, match=r"write --boxes-on stored if .* mogrify"):
        run_import("coco", source)
    assert not any((tmp_path / "out").iterdir())
    found = run_import("coco", source, "--boxes-on", "stored", advice={Rule.ROTATED: 1})
    assert found.of("a.jpg") == [("cat", [1, 2, 11, 48])]
    assert found.counts() == dict.fromkeys((ImportIssue.ROTATED, ImportIssue.SIZE, ImportIssue.CLIPPED), 1)


IMAGE_A = [picture_of(1, "a.png")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "SOURCE must be COCO's JSON"),
        (
            {"images": IMAGE_A, "categories": CATEGORIES},
            r"got categories, images in .*coco\.json; name the file",
        ),
        ({"images": IMAGE_A, "annotations": None}, "list annotations, got annotations, images in"),
        ({"annotations": [], "categories": []}, "list images"),
        ({"images": [{"id": 1}], "annotations": []}, "list images with file_name and id"),
        ({"images": IMAGE_A, "annotations": [{"id": 1, "caption": "a cat"}]}, "image or class: 1"),
        ({"images": IMAGE_A, "annotations": [annotation(1)]}, "object of an unknown class: 1"),
        (
            {"images": [picture_of(1, "gone.png")], "annotations": [], "categories": CATEGORIES},
            r"picture that is not there: 1 \(first .*images\[0\]: gone",
        ),
        (b'{"annotations": [],}', r"line 1 column \d+"),
        (b"[" * 100_000, "recursion"),
        ('{"categories": [{"name": "café"}]}'.encode("latin-1"), "no UTF-8 text"),
    ],
)
def test_a_file_that_is_none_is_refused_and_nothing_is_left(
    tmp_path: Path, run_import: Importer, content: Any, told: str
) -> None:
    draw(tmp_path / "images" / "a.png")
    source = tmp_path / "coco.json"
    source.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UserError, match=told):
        run_import("coco", source)
    assert not any((tmp_path / "out").iterdir())


def test_files_of_yolo_that_do_not_belong_together(tmp_path: Path, run_import: Importer) -> None:
    source = write_yolo(tmp_path, dict.fromkeys(("a", "b", "gone", "twice", "upper"), HALF) | {"odd": ""})
    (tmp_path / "images" / "gone.png").unlink()
    (source / "odd.txt").write_bytes(b"\xff")
    (source / "twice.TXT").write_text(HALF)
    (source / "upper.txt").rename(source / "upper.TXT")
    draw(tmp_path / "images" / "unlabelled.png")
    draw(tmp_path / "images" / "b.jpg")
    found = run_import("yolo", source)
    assert found.names == ["a.png", "unlabelled.png", "upper.png"]  # b.png has the label file of b.jpg
    assert found.counts() == dict.fromkeys(
        (
            ImportIssue.NO_PICTURE,
            ImportIssue.SEVERAL_PICTURES,
            ImportIssue.TWO_CLAIMS,
            ImportIssue.BROKEN_FILE,
            ImportIssue.NO_LABEL_FILE,
            ImportIssue.EMPTY,
        ),
        1,
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.yaml", "names: [cat, 'no']\n"),
        ("../data.yaml", "path: .\nnames:\n  0: cat\n  1: no\n"),
        ("../../names.yaml", "names: {0: cat, 1: no}"),
        ("classes.txt", "\ufeffcat\u2028\r\nno\n\n"),
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


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("names: [{name: cat, id: 0}]", "each by a text, got names="),
        ("names: {0: cat, '': dog}", "each by a text"),
        ("names: {0: cat, 1: ''}", "each by a text"),
        ("names: {0: cat, 0: dog}", "a key is written twice"),
        ("names: {0: cat, 0.0: dog}", "every class once"),
        ("names: cat", "each by a text"),
        ("names: ['<|>']", "must name every class"),
        ("names: " + "[" * 5000, "recursion"),
        (None, "name the file with --classes"),
    ],
)
def test_names_that_are_no_names_are_refused(
    tmp_path: Path, run_import: Importer, names: str | None, told: str
) -> None:
    root = write_yolo(tmp_path, {"a": HALF})
    (root / "classes.txt").unlink()
    if names is not None:
        (root / "data.yaml").write_text(names)
    with pytest.raises(UserError, match=told):
        run_import("yolo", root)


def test_folders_that_are_not_those_of_one_set_are_refused(tmp_path: Path, run_import: Importer) -> None:
    root = write_yolo(tmp_path, {"train/a": HALF})
    classes = ["--classes", str(root / "classes.txt")]
    with pytest.raises(UserError, match=r"must hold a label file .*/labels/train/train/a\.txt"):
        run_import("yolo", root / "train", *classes)
    with pytest.raises(UserError, match=f"got {root}/nowhere: No such file or directory; check"):
        run_import("yolo", root / "nowhere", *classes)
    (tmp_path / "images" / "train" / "a.png").unlink()
    with pytest.raises(UserError, match="--images must be a folder that holds"):
        run_import("yolo", root)


def test_names_sizes_and_files_of_voc(tmp_path: Path, run_import: Importer) -> None:
    source = write_voc(tmp_path, CAT, filename="C:/elsewhere/000.jpg")  # found by the XML file's own name
    write_voc(tmp_path, CAT, "b.png", "a.png")  # so that a.png has two
    for name in ("c", "e", "g"):
        write_voc(tmp_path, CAT, f"{name}.png", f"{name}.png")
    write_voc(tmp_path, CAT, "d.png", "d.png")
    write_voc(tmp_path, CAT, "f.png", "elsewhere.png")
    (source / "c.xml").write_text("<annotation><filename>")
    (source / "e.xml").write_text('<?xml version="1.0" encoding="nowhere"?><annotation/>')
    (source / "g.xml").write_text("<annotations><image name='a.png'/></annotations>")
    draw(tmp_path / "images" / "d.png", size=(99, 99))
    found = run_import("voc", source)
    assert found.names == ["d.png", "f.png"]
    assert found.counts() == {ImportIssue.BROKEN_FILE: 3, ImportIssue.TWO_CLAIMS: 1, ImportIssue.SIZE: 1}


PATIENCE_S = 120
FOUR = [{"id": number, "name": name} for number, name in enumerate(("cat", "dog", "bird", "cow"))]


def some_images(folder: Path, count: int) -> Path:
    """Image ``n`` shows the first n classes, the last one first, from the lower right to the upper left."""
    images = []
    for number in range(count):
        draw(folder / "images" / f"{number:02d}.png")
        images.append({"id": number, "file_name": f"{number:02d}.png", "width": 64, "height": 48})
    objects = [
        annotation(10 * number + each, number, category_id=each, bbox=[9 * each, 9 * each, 8, 8])
        for number in range(count)
        for each in reversed(range(min(number, 4)))
    ]
    return write_coco(folder, objects, images, FOUR)


def test_labels_in_a_prompt_are_all_classes(tmp_path: Path, run_import: Importer) -> None:
    found = run_import("coco", some_images(tmp_path, 2), "--prompt", "Which of {labels}?")
    asked = {row["messages"][0]["content"] for row in found.rows}
    assert asked == {"<image>Which of cat, dog, bird, cow?"}


def test_dialects_and_the_place_of_the_image(tmp_path: Path, run_import: Importer) -> None:
    source = some_images(tmp_path, 3)
    found = run_import("coco", source, "--dialect", "object_map", "--prompt", "Look at <image> and list.")
    assert [row["messages"][1]["content"] for row in found.rows] == [
        "{}",
        '{"object_1": {"desc": "<ref-object>", "bbox_2d": <bbox>}}',
        '{"object_1": {"desc": "<ref-object>", "bbox_2d": <bbox>}, '
        '"object_2": {"desc": "<ref-object>", "bbox_2d": <bbox>}}',
    ]
    assert found.rows[0]["messages"][0]["content"] == "Look at <image> and list."


def test_the_split_is_by_image_and_an_image_stays_on_its_side(tmp_path: Path, run_import: Importer) -> None:
    def sides(count: int, seed: str) -> tuple[set[str], set[str]]:
        train = run_import("coco", some_images(tmp_path, count), "--split", "0.3", "--seed", seed)
        val = train.path.with_name("train.val.jsonl")
        assert survey([val]).num_faults == 0
        held_out = [json.loads(line)["images"][0] for line in val.read_text().splitlines()]
        return set(train.names), {Path(name).name for name in held_out}

    train, val = sides(60, "0")
    assert (len(train | val), train & val) == (60, set())
    assert 8 <= len(val) <= 28  # 18 expected, with a deviation of 3.5
    more_train, more_val = sides(70, "0")
    assert (train < more_train, val < more_val) == (True, True)
    assert sides(60, "1") != (train, val)
    assert sides(60, "0") == (train, val)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prompt", "Where is {label}?"], r"knows \{labels\}, got \{label\}"),
        (["--prompt", "<bbox>"], "neither"),
        (["--prompt", "<image><image>"], "once"),
        (["--prompt", "Find {Labels}."], r"knows \{labels\}, got \{Labels\}"),
        (["--images", "nowhere"], "--images must be a folder"),
        (["--images", "n" * 300], "--images must be a folder"),
        (["--output", "n" * 300], "--output must be a file that can be written"),
    ],
)
def test_choices_that_cannot_be_are_refused_and_nothing_is_left(
    tmp_path: Path, run_import: Importer, options: list[str], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        run_import("coco", some_images(tmp_path, 3), *options)
    assert list(tmp_path.rglob("*.jsonl*")) == []


def test_the_command_as_its_users_call_it(tmp_path: Path) -> None:
    """From another directory's point of view, with a relative folder of images."""
    some_images(tmp_path, 3)
    words = "import coco coco.json --images images --output new/train.jsonl"
    done = run_command(*words.split(), cwd=tmp_path, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == [
        "new/train.jsonl: 3 rows with 3 objects",
        "check it with: swift-stage2 data check new/train.jsonl",
    ]
    row = json.loads((tmp_path / "new" / "train.jsonl").read_text().splitlines()[0])
    assert row["images"] == [str(tmp_path / "images" / "00.png")], "right wherever it is read"
    again = run_command(*words.split(), cwd=tmp_path, timeout=PATIENCE_S)
    assert again.returncode == 2
    assert again.stderr.startswith("swift-stage2 import: error: --output must be a new file")
    assert again.stderr.count("\n") == 1
