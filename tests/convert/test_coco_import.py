"""COCO in: each oddity of a file is handled, counted and told, and ``data check`` finds no fault in the rows."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_sources import CATEGORIES, SIZE, Importer, annotation, draw, write_coco
from pycocotools import mask as coco_mask

from swift_stage2.convert import import_command, json_arrays
from swift_stage2.convert.coco_file import CocoFile
from swift_stage2.convert.tally import Oddity, Tally
from swift_stage2.dataset import command
from swift_stage2.dataset.fault import Rule
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
    assert "1 rows of 1 images with 2 objects" in found.told


MASK = np.zeros(SIZE[::-1], np.uint8)
MASK[5:12, 7:20] = 1
COMPRESSED = coco_mask.encode(np.asfortranarray(MASK))
COUNTS = [7 * 48 + 5, *[7, 41] * 12, 7, (64 - 19) * 48 - 12]
ODD_OBJECTS: list[tuple[Oddity, dict[str, Any], list[float] | None]] = [
    (Oddity.CROWD, {"iscrowd": 1, "segmentation": {"size": [48, 64], "counts": COUNTS}}, None),
    (Oddity.MASK, {"bbox": None, "segmentation": [[5, 6, 9, 6, 9, 30], [1, 8, 2, 9, 3, 10]]}, [1, 6, 9, 30]),
    (Oddity.MASK, {"bbox": [], "segmentation": {"size": [48, 64], "counts": COUNTS}}, [7, 5, 20, 12]),
    (
        Oddity.MASK,
        {"bbox": [0, 0, 0, 0], "segmentation": {"size": [48, 64], "counts": COMPRESSED["counts"].decode()}},
        [7, 5, 20, 12],
    ),
    (Oddity.NO_BOX, {"bbox": [1, 2, 3], "segmentation": {"size": [48, 64], "counts": "no mask"}}, None),
    (Oddity.NO_BOX, {"bbox": [1, 2, float("nan"), 3]}, None),
    (Oddity.NO_BOX, {"bbox": [1, 2, 10**400, 3]}, None),
    (Oddity.NO_BOX, {"bbox": ["1", 2, 3, 4], "segmentation": [[1, 2, 3]]}, None),
    (Oddity.NO_CATEGORY, {"category_id": 4}, None),
    (Oddity.NO_IMAGE, {"image_id": 99}, None),
    (Oddity.CLIPPED, {"bbox": [-3, 40, 10, 10]}, [0, 40, 7, 48]),
    (Oddity.OUTSIDE, {"bbox": [64, 2, 5, 5]}, None),
    (Oddity.OUTSIDE, {"bbox": [-9, -9, 9, 9]}, None),
    (Oddity.FLAT, {"bbox": [5, 5, 0, 9]}, None),
    (Oddity.FLAT, {"bbox": [5, 5, 9, -2]}, None),
    (Oddity.FLAT, {"bbox": [5, 5, 1e-300, 2]}, None),
]


@pytest.mark.parametrize(("oddity", "members", "box"), ODD_OBJECTS)
def test_an_odd_object_is_counted_and_handled(
    tmp_path: Path, run_import: Importer, oddity: Oddity, members: dict[str, Any], box: list[float] | None
) -> None:
    source = write_coco(tmp_path, [annotation(1, **members), annotation(2, category_id=7)])
    found = run_import("coco", source)
    assert found.of("a.png") == [*([("cat", box)] if box else []), ("dog", [1, 2, 11, 22])]
    assert found.counts() == {oddity.found: 1}


def test_a_file_of_crowds_alone_or_of_no_objects(tmp_path: Path, run_import: Importer) -> None:
    assert run_import("coco", write_coco(tmp_path)).counts() == {Oddity.EMPTY.found: 1}
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
        Oddity.TWO_FILES.found: 1,
        Oddity.LISTED_TWICE.found: 2,
        Oddity.ID_TWICE.found: 1,
        Oddity.REPEATED.found: 1,
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
        Oddity.ABSENT.found: 1,
        Oddity.UNREADABLE.found: 2,
        Oddity.NOT_UTF8.found: 1,
        Oddity.EMPTY.found: 1,
        Oddity.SIZE.found: 1,
    }


def test_a_file_in_latin_1_gives_up_its_image_names_and_keeps_its_labels(
    tmp_path: Path, run_import: Importer
) -> None:
    draw(tmp_path / "images" / "a.png")
    images = [picture_of(1, "a.png"), picture_of(2, "café.png")]
    source = write_coco(tmp_path, [annotation(1)], images, [{"id": 3, "name": "café"}])
    text = json.dumps(json.loads(source.read_text()), ensure_ascii=False)
    source.write_bytes(text.encode("latin-1"))
    found = run_import("coco", source)
    assert found.of("a.png") == [("café", [1, 2, 11, 22])]
    assert found.counts() == {Oddity.NOT_UTF8.found: 1, Oddity.RESPELT.found: 1}


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_labels_that_an_answer_cannot_hold_are_respelt(
    tmp_path: Path, run_import: Importer, bom: bytes
) -> None:
    names = ['12" pipe', "a\\b", " <bbox>\n", "<<image>>"]
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    annotations = [annotation(number, category_id=number, bbox=[number, 0, 9, 9]) for number in range(4)]
    source = write_coco(tmp_path, annotations, categories=categories)
    source.write_bytes(bom + source.read_bytes())
    found = run_import("coco", source)
    assert [label for label, _ in found.of("a.png")] == ["12' pipe", "a/b", "bbox", "image"]
    assert found.counts() == {Oddity.RESPELT.found: 4}


def test_a_turned_picture_is_taken_as_it_is_stored_where_that_is_said(
    tmp_path: Path, run_import: Importer
) -> None:
    draw(tmp_path / "images" / "a.jpg", orientation=6)
    upright = {"width": SIZE[1], "height": SIZE[0]}
    source = write_coco(tmp_path, [annotation(1, bbox=[1, 2, 10, 60])], [picture_of(1, "a.jpg", **upright)])
    found = run_import("coco", source, "--boxes-on", "stored", advice={Rule.ROTATED: 1})
    assert found.of("a.jpg") == [("cat", [1, 2, 11, 48])]
    assert found.counts() == {Oddity.ROTATED.found: 1, Oddity.UPRIGHT.found: 1, Oddity.CLIPPED.found: 1}
    assert "they are trained as stored, and so boxes fit" in found.told


def test_a_turned_picture_is_asked_about(tmp_path: Path) -> None:
    draw(tmp_path / "images" / "a.jpg", orientation=6)
    source = write_coco(tmp_path, [annotation(1)], [picture_of(1, "a.jpg")])
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match=r"write --boxes-on upright if .* or --boxes-on stored if"):
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
    assert command.main(["check", str(tmp_path / "rows.jsonl")]) == 0


def test_boxes_drawn_upright_pass_the_check_once_the_picture_is_turned(
    tmp_path: Path, run_import: Importer, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "images" / "a.jpg", orientation=6)
    upright = {"width": SIZE[1], "height": SIZE[0]}
    source = write_coco(tmp_path, [annotation(1, bbox=[1, 2, 10, 60])], [picture_of(1, "a.jpg", **upright)])
    rows, turned = tmp_path / "rows.jsonl", tmp_path / "turned.jsonl"
    options = ["--images", str(tmp_path / "images"), "--output", str(rows), "--boxes-on", "upright"]
    import_command.main(["coco", str(source), *options])
    told = capsys.readouterr().out
    assert (
        "pictures with an EXIF rotation: 1; boxes fit the upright picture, but the stored one is trained"
        in told
    )
    assert "--apply-exif upright" in told
    assert command.main(["check", str(rows), "--apply-exif", "upright", "--output", str(turned)]) == 0
    assert json.loads(turned.read_text())["objects"]["bbox"] == [[1, 2, 11, 62]]


REFUSED = [
    ([], "SOURCE must be COCO's JSON"),
    ({"annotations": [], "categories": []}, "list images"),
    ({"images": [{"id": 1}]}, "every image needs file_name and id"),
    (
        {"images": [picture_of(1, "a.png")], "annotations": [{"id": 1, "caption": "a cat"}]},
        "every annotation needs",
    ),
    ({"images": [picture_of(1, "a.png")], "annotations": [annotation(1)]}, "object of an unknown class: 1"),
    (
        {"images": [picture_of(1, "gone.png")], "annotations": [], "categories": CATEGORIES},
        "image file is not there: 1",
    ),
    (
        {"images": [picture_of(1, "a.png")], "categories": CATEGORIES},
        r"list annotations, got categories, images alone in .*coco\.json; name the file with the annotations",
    ),
    ({"images": [picture_of(1, "a.png")], "annotations": None}, "list annotations, got images alone"),
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


def test_a_cut_file_is_refused_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_coco(tmp_path, [annotation(number) for number in range(30)])
    text = source.read_text()
    source.write_text(text[:700])
    monkeypatch.setattr(json_arrays, "_WINDOW", 64)
    with pytest.raises(UserError, match=r"at character \d+") as caught:
        CocoFile(source, Tally())
    (place,) = re.findall(r"(?<! at) at character (\d+)", str(caught.value))
    assert int(place) <= 701, "within the file"


@pytest.mark.parametrize("behind", ["x", "{}", "\n]"])
def test_what_stands_behind_the_object_is_refused_with_its_place(tmp_path: Path, behind: str) -> None:
    source = write_coco(tmp_path, [annotation(1)])
    text = source.read_text()
    source.write_text(f"{text} \n")
    CocoFile(source, Tally())
    source.write_text(text + behind)
    place = len(text) + behind.index(behind.strip()[0]) + 1
    with pytest.raises(UserError, match=f"expected nothing behind the object at character {place:,};"):
        CocoFile(source, Tally())


@pytest.mark.parametrize("window", [1, 2, 7, 64, 1 << 20])
def test_the_window_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    content = {
        "a": [1234, "é", {"b": [1.5, {}]}, []],
        "n": 1234,
        "b": [],
        "c": {"d": [1]},
        "e": [[12, 3]],
        "f": -1e3,
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    monkeypatch.setattr(json_arrays, "_WINDOW", window)
    told: list[int] = []
    found = list(json_arrays.read_arrays(path, told.append))
    assert found == [(key, element) for key in ("a", "b", "e") for element in content[key]]  # type: ignore[attr-defined]
    assert told[-1] == len(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_memory_per_annotation_is_that_of_its_columns(tmp_path: Path) -> None:
    """Peak over the file's own reading, with masks, which are dropped as they come."""
    count = 20_000
    polygon = [[float(number) for number in range(60)]]
    objects = [annotation(n, n % 100, segmentation=polygon) for n in range(count)]
    source = write_coco(tmp_path, objects, [picture_of(n, f"{n}.png") for n in range(100)])
    CocoFile(source, Tally())
    tracemalloc.start()
    try:
        images = CocoFile(source, Tally())
        num_objects = sum(len(image.objects) for image in images)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_objects == count
    assert peak < 4 * json_arrays._WINDOW + 8_000_000 + 120 * count
