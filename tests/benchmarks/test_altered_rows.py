"""Tests of the rows that two arms of ``bench learning`` train in place of the scenes'."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.altered_rows import corrected_rows, noisy_rows
from swift_stage2.demo.scenes import IMAGE_SIZE

BOXES = {"red circle": [10, 10, 50, 50], "blue square": [60, 20, 100, 90], "green circle": [20, 70, 40, 100]}


def _rows(path: Path, num_rows: int) -> list[dict[str, Any]]:
    rows = [
        {"images": [f"{number}.png"], "objects": {"ref": list(BOXES), "bbox": list(BOXES.values())}}
        for number in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _answer(*labels: str) -> str:
    return json.dumps([{"label": label, "bbox_2d": BOXES[label]} for label in labels])


@pytest.mark.parametrize(
    ("found", "listed"),
    [
        ((), list(BOXES)),
        (("green circle",), ["green circle", "red circle", "blue square"]),
        (("blue square", "red circle"), ["blue square", "red circle", "green circle"]),
    ],
)
def test_what_an_answer_found_comes_first_in_its_order_and_nothing_is_lost(
    tmp_path: Path, found: tuple[str, ...], listed: list[str]
) -> None:
    (row,) = _rows(tmp_path / "rows.jsonl", 1)
    (corrected,) = map(json.loads, corrected_rows(tmp_path / "rows.jsonl", [_answer(*found)]).splitlines())
    boxes = [BOXES[label] for label in listed]
    assert corrected == {**row, "objects": {"ref": listed, "bbox": boxes}}


def test_an_answer_that_cannot_be_read_leaves_the_row_as_it_is(tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.jsonl", 2)
    texts = corrected_rows(tmp_path / "rows.jsonl", ["no JSON", ""]).splitlines()
    assert list(map(json.loads, texts)) == rows


def test_noise_moves_edges_a_little_shuffles_and_loses_no_object(tmp_path: Path) -> None:
    _rows(tmp_path / "rows.jsonl", 40)
    text = noisy_rows(tmp_path / "rows.jsonl", seed=3)
    rows = list(map(json.loads, text.splitlines()))
    assert Counter(row["images"][0] for row in rows) == {f"{number}.png": 2 for number in range(40)}
    orders, moves = set(), set()
    for row in rows:
        labels, boxes = row["objects"]["ref"], row["objects"]["bbox"]
        assert sorted(labels) == sorted(BOXES)
        orders.add(tuple(labels))
        for label, box in zip(labels, boxes, strict=True):
            assert 0 <= box[0] < box[2] < IMAGE_SIZE[0]
            assert 0 <= box[1] < box[3] < IMAGE_SIZE[1]
            moves |= {now - then for now, then in zip(box, BOXES[label], strict=True)}
    assert len(orders) == 6
    assert min(moves) < 0 < max(moves)
    assert max(map(abs, moves)) < 15  # seven standard deviations of the longest side
    assert noisy_rows(tmp_path / "rows.jsonl", seed=3) == text
