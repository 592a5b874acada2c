"""Points in masks and boxes, pixel by pixel as pycocotools decodes them; import, check and evaluate of points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_sources import SIZE, Importer, annotation, draw, write_coco
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as oracle
from pycocotools.coco import COCO

from swift_stage2.cli import main
from swift_stage2.data.regions import are_inside, mask_of, point_in
from swift_stage2.data.sources import ImportIssue
from swift_stage2.errors import SampleError

Out = pytest.CaptureFixture[str]
WIDTH, HEIGHT = SIZE
U_SHAPE = [[10, 10, 14, 10, 14, 30, 26, 30, 26, 10, 30, 10, 30, 34, 10, 34]]
"""Its centroid lies between its arms."""
DISC = np.asfortranarray(
    np.hypot(*(np.indices((HEIGHT, WIDTH)) - np.array([20, 40])[:, None, None])) < 8, np.uint8
)
RUNS = oracle.encode(DISC)
COMPRESSED = {"size": RUNS["size"], "counts": RUNS["counts"].decode()}


def decoded(segmentation: Any) -> np.ndarray:
    found = segmentation if segmentation is COMPRESSED else oracle.frPyObjects(segmentation, HEIGHT, WIDTH)
    return np.asarray(oracle.decode(oracle.merge(found) if isinstance(found, list) else found))


corners = st.lists(st.tuples(st.integers(-50, 700), st.integers(-50, 700)), min_size=3, max_size=6)
polygons = corners.map(lambda points: [value / 10 for point in points for value in point])
runs = st.lists(st.integers(1, 380), max_size=8).map(
    lambda counts: {"size": [HEIGHT, WIDTH], "counts": [*counts, WIDTH * HEIGHT - sum(counts)]}
)


@given(segmentation=st.lists(polygons, min_size=1, max_size=2) | runs)
def test_a_mask_is_pycocotools_and_its_point_lies_in_it(segmentation: Any) -> None:
    expected = decoded(segmentation)
    if not expected.any():
        with pytest.raises(SampleError):
            mask_of(segmentation, SIZE)
        return
    assert (mask_of(segmentation, SIZE) == expected).all()
    x, y = point_in(expected)
    assert expected[int(y), int(x)]
    rows, columns = np.indices(expected.shape)
    middles = np.stack([columns.ravel() + 0.5, rows.ravel() + 0.5], axis=1)
    assert (are_inside(middles, json.dumps(segmentation), SIZE) == expected.ravel()).all()


def test_the_point_is_the_centroid_or_the_deepest_pixel() -> None:
    assert point_in(decoded([[4, 4, 12, 4, 12, 8, 4, 8]])) == (8, 6)
    assert point_in(DISC) == (40.5, 20.5)
    found = decoded(U_SHAPE)
    x, y = point_in(found)
    others = np.argwhere(np.pad(found, 1) == 0) - 1
    depths = {tuple(pixel): np.hypot(*(others - pixel).T).min() for pixel in np.argwhere(found)}
    assert depths[(int(y), int(x))] == max(depths.values())


def test_the_border_is_of_a_box_and_of_the_pixels_that_a_mask_has() -> None:
    points = [(10, 5), (20, 15), (15.5, 9.9), (9.9, 9), (15, 15.1), (-15, 9)]
    assert are_inside(points, "[10, 5, 20, 15]", SIZE).tolist() == [True] * 3 + [False] * 3
    square = "[[10, 5, 20, 5, 20, 15, 10, 15]]"
    assert are_inside(points, square, SIZE).tolist() == [True, False, True, False, False, False]


NO_REGIONS = ("", "[", "1", "[[1, 2, 3, 4]]", "[[]]", '{"size": [48, 64]}', "[" * 99999)


@pytest.mark.parametrize("region", [*NO_REGIONS, '{"size": [1, 1], "counts": [0, 1]}'])
def test_what_is_no_region_is_told(region: str) -> None:
    with pytest.raises(SampleError, match=r"a (mask|region) must be"):
        are_inside([(1, 1)], region, SIZE)


OBJECTS = [
    annotation(1, segmentation=U_SHAPE),
    annotation(2, segmentation=COMPRESSED, category_id=7),
    annotation(3, bbox=[50, 30, 9, 30], segmentation=[]),
    annotation(4, segmentation=[[1, 1]], bbox=[2, 2, 3, 3]),
    annotation(5, iscrowd=1, segmentation=COMPRESSED),
]


def test_import_check_and_evaluate_of_points(tmp_path: Path, run_import: Importer, capsys: Out) -> None:
    draw(tmp_path / "images" / "b.png")
    images = [{"id": 2, "file_name": "b.png"}, {"id": 1, "file_name": "a.png"}]
    draw(tmp_path / "images" / "a.png")
    source = write_coco(tmp_path, OBJECTS, images)
    found = run_import("coco", source, "--points", num_coordinates=2)
    counts = {ImportIssue.EMPTY: 1, ImportIssue.CROWD: 1, ImportIssue.CLIPPED: 1, ImportIssue.BAD_MASK: 1}
    assert found.counts() == counts
    assert found.rows[0]["objects"] == {"ref": [], "bbox": [], "region": []}
    labels, points = zip(*found.of("a.png"), strict=True)
    assert labels == ("cat", "dog", "cat", "cat")
    assert points[2:] == ([54.5, 39.0], [3.5, 3.5])
    whole = COCO(str(source))
    whole.imgs[1] |= {"height": HEIGHT, "width": WIDTH}
    for key, (x, y) in zip((1, 2), points[:2], strict=True):
        assert whole.annToMask(whole.anns[key])[int(y), int(x)]
    regions = list(map(json.loads, found.rows[1]["objects"]["region"]))
    assert regions == [U_SHAPE, COMPRESSED, [50, 30, 59, 48], [2, 2, 5, 5]]
    capsys.readouterr()
    assert main(["data", "check", str(found.path)]) == 0
    assert "dialect point_list" in capsys.readouterr().out
    # In an arm of the U; beside the disc; in the box's corner; far off.
    said = {"ref": list(labels), "bbox": [[12, 11], [51, 20], [50, 30], [60, 2]]}
    lines = [{"image": row["images"][0], "width": WIDTH, "height": HEIGHT} for row in found.rows]
    lines[0]["objects"], lines[1]["objects"] = {"ref": [], "bbox": []}, said
    predictions = tmp_path / "predictions.jsonl"
    predictions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--data", str(found.path), "--predictions", str(predictions)]
    assert main(["evaluate", *words, "--radius", "11", "--json"]) == 0
    metrics = {name: of["value"] for name, of in json.loads(capsys.readouterr().out)["metrics"].items()}
    assert metrics["eval/recall_inside"] == metrics["eval/precision_inside"] == 0.5
    assert metrics["class/dog/f1"] == 1
    assert metrics["class/dog/recall_inside"] == 0
    assert metrics["class/dog/mean_distance"] == pytest.approx(np.hypot(10.5, 0.5))
