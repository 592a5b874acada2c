"""Points by hand, against scipy's assignments, and as the command tells and refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detection_sets import line, write_lines
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from swift_stage2.channel_b.dialects import OBJECT_LIST, POINT_LIST
from swift_stage2.cli import main
from swift_stage2.data.point_scores import PointScores
from swift_stage2.data.prediction import answer_dialect, read_predictions, read_rows

Places = list[tuple[str, tuple[float, ...]]]
Out = pytest.CaptureFixture[str]
A, B = "a.png", "b.png"


def row(image: str, objects: Places, regions: list[Any] | None = None) -> dict[str, Any]:
    listed = ", ".join('{"point_2d": <bbox>, "label": "<ref-object>"}' for _ in objects)
    lists: dict[str, Any] = {"ref": [label for label, _ in objects], "bbox": [place for _, place in objects]}
    if regions is not None:
        lists["region"] = [json.dumps(region) for region in regions]
    messages = [{"role": "user", "content": "<image>Point."}, {"role": "assistant", "content": f"[{listed}]"}]
    return {"messages": messages, "images": [image], "objects": lists}


TRUTH = [
    row(A, [("car", (100, 100)), ("car", (130, 100)), ("dog", (300, 300))],
        [[80, 80, 120, 120], [110, 80, 150, 120], [[290, 290, 310, 290, 310, 310]]]),
    row(B, [], []),
]  # fmt: skip
SAID = [
    line(A, [("car", (115, 100)), ("car", (100, 103)), ("dog", (305, 306)), ("cat", (1, 1))]),
    line(B, [("dog", (5, 5))]),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "val.jsonl", TRUTH)


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "p.jsonl", SAID)


def scored(data: Path, predictions: Path, radius: float | None = None) -> PointScores:
    rows = read_rows(data, 2)
    return PointScores(rows, read_predictions(predictions, rows), {}, radius)


@pytest.mark.parametrize(
    ("radius", "pairs", "pixels"),
    [
        (None, 3, 15 + 3 + np.hypot(5, 6)),  # 5 % of the diagonal of 400 x 400, which is 28.3
        (15, 3, 15 + 3 + np.hypot(5, 6)),
        (14.9, 2, 3 + np.hypot(5, 6)),
        (3, 1, 3),
        (2.9, 0, 0),
    ],
)
def test_by_hand(data: Path, predictions: Path, radius: float | None, pairs: int, pixels: float) -> None:
    scores = scored(data, predictions, radius)
    found = scores.points()
    ratios = found["eval/precision"], found["eval/recall"], found["eval/f1"]
    assert ratios == pytest.approx((pairs / 5, pairs / 3, 2 * pairs / 8))
    assert found.get("eval/mean_distance") == (pytest.approx(pixels / pairs) if pairs else None)
    # Each car has a point of its own; the dog's lies in its triangle's box, and outside of the triangle.
    assert (found["eval/precision_inside"], found["eval/recall_inside"]) == (2 / 5, 2 / 3)
    assert found["class/car/f1_inside"] == 1
    assert "class/cat/recall" not in found
    assert found["objects/0/precision"] == found["class/dog/f1_inside"] == 0
    assert not any("iou" in name or "aspect" in name or name.endswith("/ap") for name in found)
    bounds = scores.intervals(50)
    assert bounds["eval/f1"].low <= found["eval/f1"] <= bounds["eval/f1"].high
    assert set(scores.intervals(50, minus=scores).values()) == {(0.0, 0.0)}


@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_those_of_other_solvers(tmp_path: Path, seed: int) -> None:
    generator, radius = np.random.default_rng(seed), 25.0
    truth, said = (
        [(("a", "b")[n % 2], tuple(map(float, generator.integers(0, 120, 2)))) for n in range(40)]
        for _ in "ab"
    )
    boxes = [[x - 20, y - 9, x + 20, y + 9] for _, (x, y) in truth]
    rows = write_lines(tmp_path / "val.jsonl", [row(A, truth, boxes)])
    scores = scored(rows, write_lines(tmp_path / "p.jsonl", [line(A, said)]), radius)
    found = scores.points()
    same = np.array([[one == other for other, _ in truth] for one, _ in said])
    steps = np.array([[np.subtract(one, other) for _, other in truth] for _, one in said])
    apart = np.hypot(*np.moveaxis(steps, -1, 0))
    gains = np.where(same & (apart <= radius), 2 - apart / radius, 0)
    best = gains[linear_sum_assignment(gains, maximize=True)].sum()
    ones, others, close = map(np.array, zip(*scores.matched[0], strict=True))
    assert gains[ones, others].sum() == pytest.approx(best)  # several assignments may have that
    assert len(set(ones)) == len(set(others)) == np.count_nonzero(gains[ones, others])
    assert close == pytest.approx(1 - apart[ones, others] / radius)
    assert found["eval/mean_distance"] == pytest.approx(apart[ones, others].mean())
    holds = same & (np.abs(steps) <= [20, 9]).all(axis=-1)
    most = np.count_nonzero(maximum_bipartite_matching(csr_array(holds)) >= 0)
    assert found["eval/recall_inside"] == most / 40


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


def test_page_and_comparison_have_points_alone(
    data: Path, predictions: Path, tmp_path: Path, capsys: Out
) -> None:
    assert evaluate("--data", data, "--predictions", predictions, "--output", tmp_path / "out") == 0
    told = capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert "errors" not in facts
    page = (tmp_path / "out" / "evaluation.html").read_text()
    for text in (told, page):
        assert "eval/recall_inside" in text
        assert "0.05 of the image" in text
        assert not any(word in text for word in ("IoU", "AP50", "TIDE"))
    better = write_lines(tmp_path / "b.jsonl", [SAID[0], line(B, [])])
    assert evaluate("--data", data, "--compare", predictions, better, "--json", "--radius", 15) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["eval/f1"]["difference"] == pytest.approx(6 / 7 - 6 / 8)
    assert metrics["eval/f1_inside"]["low"] >= 0
    assert metrics["eval/mean_distance"]["difference"] == 0


def test_rows_without_regions_tell_nothing_of_inside(tmp_path: Path, predictions: Path, capsys: Out) -> None:
    bare = write_lines(tmp_path / "bare.jsonl", [TRUTH[0], row(B, [("dog", (5, 5))])])
    assert evaluate("--data", bare, "--predictions", predictions, "--output", tmp_path / "out") == 0
    assert "some rows lack objects.region" in " ".join(capsys.readouterr().out.split())
    assert "inside" not in (tmp_path / "out" / "evaluation.json").read_text()


ONE: Places = [("car", (1, 2))]
ONE_BOX: Places = [("car", (1, 2, 3, 4))]
BOXES, POINT, BOX = row(A, ONE_BOX), line(A, ONE), line(A, ONE_BOX)


@pytest.mark.parametrize(
    ("rows", "lines", "options", "told"),
    [
        (TRUTH, [BOX], (), "p.jsonl:1: objects.bbox must hold points of two numbers"),
        ([BOXES], [POINT], (), "p.jsonl:1: objects.bbox must hold boxes of four numbers"),
        ([row(A, [])], [POINT], (), "p.jsonl:1: objects.bbox must hold boxes"),
        ([BOXES], [BOX], ("--radius", 9), "--radius is of points"),
        (TRUTH, [POINT], ("--score", "none"), "--score is of boxes"),
        ([row(A, [])], [], ("--radius", 9), "--radius is of points"),
        ([TRUTH[0], BOXES], [], (), "val.jsonl:2: a point must be two numbers"),
        ([row(A, [*ONE, *ONE_BOX])], [], (), "val.jsonl:1: a point must be two numbers"),
        ([row(A, ONE, [5])], [POINT], (), "row 0 (a.png): a mask must be"),
        ([row(A, ONE, [])], [POINT], (), "row 0 (a.png): objects.region must hold one text"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, rows: Any, lines: Any, options: tuple[object, ...], told: str, capsys: Out
) -> None:
    data, found = write_lines(tmp_path / "val.jsonl", rows), write_lines(tmp_path / "p.jsonl", lines)
    assert evaluate("--data", data, "--predictions", found, "--json", *options) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error


def test_a_file_without_objects_is_one_of_boxes(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "empty.jsonl", [row(A, [])])
    assert answer_dialect(read_rows(empty)) is OBJECT_LIST
    mixed = write_lines(tmp_path / "mixed.jsonl", [row(B, []), TRUTH[0]])
    assert answer_dialect(read_rows(mixed, 2)) is POINT_LIST
    silent = write_lines(tmp_path / "p.jsonl", [line(A, [])])
    assert evaluate("--data", empty, "--predictions", silent, "--json") == 0
