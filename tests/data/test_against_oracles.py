"""What is drawn and written down is read as pycocotools and globox read it, whatever spelling its values have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_sources import SIZE, Importer, draw, write_coco
from globox import AnnotationSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO

from swift_stage2.data.sources import ImportIssue

WIDTH, HEIGHT = SIZE
NAMES = ("cat", "dog")
fast = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Object = tuple[str, tuple[float, ...]]


def spelt(value: float) -> st.SearchStrategy[Any]:
    """A number as people's tools write it."""
    return st.sampled_from([value, str(value), f"{value:.18e}", f"{float(value)} "])


@st.composite
def interval(draw_value: st.DrawFn, side: int) -> tuple[float, float]:
    """Start and length, in tenths of a pixel; it may reach over the side."""
    start = draw_value(st.integers(0, 10 * side + 50))
    return start / 10, draw_value(st.integers(0, 10 * side)) / 10


boxes = st.tuples(st.sampled_from(range(len(NAMES))), interval(WIDTH), interval(HEIGHT))


def clipped(label: str, box: tuple[float, ...]) -> Object | None:
    x1, y1, x2, y2 = box
    inside = max(x1, 0), max(y1, 0), min(x2, WIDTH), min(y2, HEIGHT)
    has_area = round(inside[2] - inside[0], 6) > 0 and round(inside[3] - inside[1], 6) > 0
    return (label, tuple(round(edge, 6) for edge in inside)) if has_area else None


def expected(read: list[Object]) -> list[Object]:
    """Each once, on the picture, with an area; the anchor keeps a picture from being one of shares."""
    once = dict.fromkeys((label, tuple(round(edge, 6) for edge in box)) for label, box in read)
    return [found for each in once if (found := clipped(*each))]


def imported(
    run_import: Importer, kind: str, source: Path, *options: str
) -> tuple[list[Object], dict[ImportIssue, int]]:
    found = run_import(kind, source, *options)
    return [(label, tuple(box)) for label, box in found.of("a.png")], found.counts()


def balanced(drawn: int, kept: int, counts: dict[ImportIssue, int]) -> bool:
    """Every object is kept or told."""
    left_out = (ImportIssue.CROWD, ImportIssue.OUTSIDE, ImportIssue.FLAT, ImportIssue.REPEATED)
    return drawn == kept + sum(counts.get(issue, 0) for issue in left_out)


@fast
@given(data=st.data(), objects=st.lists(boxes, max_size=6))
def test_coco_is_what_pycocotools_reads(
    tmp_path: Path, run_import: Importer, data: st.DataObject, objects: list[Any]
) -> None:
    objects = [*objects, (0, (1, 20), (1, 20))]
    plain, written = [], []
    for number, (category, (x, width), (y, height)) in enumerate(objects):
        crowd = int(number + 1 < len(objects) and data.draw(st.booleans()))
        entry = {"id": number, "image_id": 1, "category_id": category, "bbox": [x, y, width, height]}
        plain.append(entry | {"iscrowd": crowd, "area": width * height})
        flags: list[Any] = [1, "1", True, "True", 1.0] if crowd else [0, "0", False, "False", None, "", 0.0]
        entry["bbox"] = [data.draw(spelt(each)) for each in (x, y, width, height)]
        for key in ("image_id", "category_id"):
            entry[key] = data.draw(st.sampled_from([entry[key], str(entry[key]), float(entry[key])]))  # type: ignore[arg-type]
        written.append(entry | {"iscrowd": data.draw(st.sampled_from(flags))})
    categories = [{"id": number, "name": name} for number, name in enumerate(NAMES)]
    oracle_file = tmp_path / "oracle.json"
    images = [{"id": 1, "file_name": "a.png", "width": WIDTH, "height": HEIGHT}]
    oracle_file.write_text(json.dumps({"images": images, "annotations": plain, "categories": categories}))
    oracle = COCO(str(oracle_file))
    read = [
        (NAMES[each["category_id"]], (x, y, x + width, y + height))
        for each in oracle.loadAnns(oracle.getAnnIds(imgIds=[1], iscrowd=False))
        for x, y, width, height in [each["bbox"]]
    ]
    found, counts = imported(run_import, "coco", write_coco(tmp_path, written, categories=categories))
    assert found == expected(read)
    assert balanced(len(written), len(found), counts)


@fast
@given(data=st.data(), objects=st.lists(boxes, max_size=6))
def test_yolo_is_what_globox_reads(
    tmp_path: Path, run_import: Importer, data: st.DataObject, objects: list[Any]
) -> None:
    draw(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir(exist_ok=True)
    (tmp_path / "labels" / "classes.txt").write_text("\n".join(NAMES))
    lines, plain = [], []
    for category, (x, width), (y, height) in [*objects, (0, (1, 20), (1, 20))]:
        x, y, width, height = x / WIDTH % 1, y / HEIGHT % 1, width / WIDTH, height / HEIGHT
        plain.append(f"{category} {x!r} {y!r} {width!r} {height!r}")
        fields = [data.draw(spelt(each)) for each in (category, x, y, width, height)]
        behind = data.draw(st.sampled_from(["", " 0.5"]))
        lines.append(" ".join(map(str, fields)) + behind)
    ends = data.draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
    bom = data.draw(st.sampled_from(["utf-8", "utf-8-sig"]))
    (tmp_path / "labels" / "a.txt").write_bytes(ends.join(lines).encode(bom))
    oracle_folder = tmp_path / "oracle"
    oracle_folder.mkdir(exist_ok=True)
    (oracle_folder / "a.txt").write_text("\n".join(plain))
    oracle = AnnotationSet.from_yolo_v5(
        oracle_folder, image_folder=tmp_path / "images", image_extension=".png"
    )
    read = [
        (NAMES[int(box.label)], (box.xmin, box.ymin, box.xmax, box.ymax))
        for annotation in oracle
        for box in annotation.boxes
    ]
    found, counts = imported(run_import, "yolo", tmp_path / "labels")
    wanted = expected(read)
    assert [label for label, _ in found] == [label for label, _ in wanted]
    for (_, box), (_, other) in zip(found, wanted, strict=True):
        assert box == pytest.approx(other, abs=2e-6)
    assert balanced(len(lines), len(found), counts)
