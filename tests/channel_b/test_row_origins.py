"""A row that ms-swift concatenated, sampled and shuffled is still known by its file and line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from swift_stage2.channel_b.sample_source import RowOrigins


def _row(number: int, image: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "<image>Detect."},
            {"role": "assistant", "content": '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'},
        ],
        "images": [image],
        "objects": {"ref": ["cat"], "bbox": [[number, 2, number + 3, 4.5]]},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files with a blank line behind every row."""
    return [
        _write(tmp_path / f"{name}.jsonl", [_row(number, f"/{name}/{number}.png") for number in range(40)])
        for name in "ab"
    ]


@pytest.mark.usefixtures("template")  # declares what ms-swift imports on a machine without a GPU
def test_rows_of_ms_swift_are_found(files: list[Path]) -> None:
    from swift.dataset import load_dataset

    places = [f"{files[0]}#30", str(files[1])]
    train, validation = load_dataset(
        places, split_dataset_ratio=0.2, shuffle=True, seed=3, load_from_cache_file=False, num_proc=1
    )
    origins = RowOrigins(files)
    found = [(row, origins.find(row)) for rows in (train, validation) for row in rows]
    assert len(found) == 70
    for row, origin in found:
        path = Path(row["images"][0]["path"])
        assert origin.file == str(files["ab".index(path.parent.name)])
        assert origin.line == 2 * int(path.stem) + 1
        assert origin.images == (str(path),)
    assert [origin.line for _, origin in found] != sorted(origin.line or 0 for _, origin in found)


def test_the_same_row_twice_is_told_by_its_first_line(tmp_path: Path) -> None:
    rows = [_row(number % 3, "/a.png") for number in range(9)]
    origins = RowOrigins([_write(tmp_path / "a.jsonl", rows)])
    assert [origins.find(row).line for row in rows] == [1, 3, 5] * 3


def test_what_is_in_no_file_is_told_without_a_line(files: list[Path]) -> None:
    origin = RowOrigins(files).find(_row(99, "/c.png"))
    assert (origin.file, origin.line, origin.images) == (None, None, ("/c.png",))
    assert str(origin) == "a row of no local JSONL, image /c.png"
    assert str(RowOrigins(files).find(_row(7, "/a/7.png"))) == f"{files[0]}:15, image /a/7.png"
    assert RowOrigins([files[0].with_name("absent.jsonl")]).find({}).line is None


def test_lines_that_are_no_rows_move_no_number(tmp_path: Path) -> None:
    rows = [json.dumps(_row(number, "/a.png")) for number in range(3)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["{", rows[0], "", "[1]", rows[1], "\xff", rows[2]]), encoding="latin-1")
    origins = RowOrigins([path])
    lines = [origins.find(json.loads(row)).line for row in random.Random(1).sample(rows, 3)]
    assert sorted(line or 0 for line in lines) == [2, 5, 7]
