"""A row is told by file and line, whatever it holds and where; nothing that reads rows ends in an error."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_files import make_image, make_row, write_rows

from swift_stage2.channel_b.sample_source import RowOrigins
from swift_stage2.data.survey import survey

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.sampled_from(
        ["", "<bbox>", "<ref-object>", "[", "\ud800", "\u0000", "<|im_end|>", "cat", "\u2028", "norm1"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["path", "role"]), inner),
    max_leaves=4,
)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [place for key in keys for place in ((*path, key), *_places(node[key], (*path, key)))]


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    image = make_image(tmp_path_factory.mktemp("images") / "a.jpg", orientation=6)
    return make_row(image, bbox_type="real", image_id=[0])


def test_a_row_of_brackets_is_a_fault(tmp_path: Path, row: dict[str, Any]) -> None:
    found = survey([write_rows(tmp_path / "rows.jsonl", ["[" * 100_000, row])])
    assert (found.num_rows, found.num_bad_rows, found.faults[0].place.line) == (2, 1, 1)


@given(data=st.data())
def test_no_row_ends_what_reads_it(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], data: st.DataObject
) -> None:
    spoilt = copy.deepcopy(row)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, key = data.draw(st.sampled_from(_places(spoilt)))
        node = spoilt
        for step in path:
            node = node[step]
        node[key] = data.draw(JSON)
        if not _places(spoilt):
            break
    directory = tmp_path_factory.mktemp("spoilt")
    try:
        file = write_rows(directory / "rows.jsonl", [row, spoilt, row])
        found = survey([file])
        assert found.num_rows == 3
        for fault in found.faults:
            assert str(fault).startswith(f"{file}:")
        assert [fault for fault in found.faults if fault.place.line != 2 and not fault.rule.is_advice] == []
        RowOrigins([file]).find(spoilt)
    finally:
        shutil.rmtree(directory)
