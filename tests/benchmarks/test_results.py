from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import ResultTable, publish

TABLE = ResultTable("Times", ("what", "ms"), (("plan", "1.0"), ("a|b", "2.0")))


def test_results_are_told_three_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, "times", {"plan": [1.0]}, TABLE, "All of it.")
    expected = "Times\n\n| what | ms |\n| --- | --- |\n| plan | 1.0 |\n| a/b | 2.0 |\n\nAll of it.\n"
    assert (tmp_path / "times.md").read_text() == expected
    assert json.loads((tmp_path / "times.json").read_text()) == {"plan": [1.0]}
    printed = capsys.readouterr().out
    for words in ("Times", "a|b", "All of it.", f"{tmp_path}/times.json"):
        assert words in printed


def test_a_long_row_stays_one_line_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = tuple(f"column number {number:02}" for number in range(8))
    publish(tmp_path, "wide", {}, ResultTable("Wide", row, (row,)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "column number 07" in line]
    assert lines
    assert all("column number 00" in line for line in lines)
