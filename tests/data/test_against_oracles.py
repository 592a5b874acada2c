"""What is drawn and written down is read as pycocotools reads it, whatever spelling its values have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drawn_sources import SIZE, Importer, write_coco
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO

from swift_stage2.data.sources import ImportIssue

WIDTH, HEIGHT = SIZE
NAMES = ("cat", "dog")
Object = tuple[str, tuple[float, ...]]
LEFT_OUT = (ImportIssue.CROWD, ImportIssue.OUTSIDE, ImportIssue.FLAT, ImportIssue.REPEATED)


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    found = run_import("coco", write_coco(tmp_path, written, categories=categories))
    kept, counts = [(label, tuple(box)) for label, box in found.of("a.png")], found.counts()
    assert kept == expected(read)
    assert len(written) == len(kept) + sum(counts.get(issue, 0) for issue in LEFT_OUT), "all others are told"
