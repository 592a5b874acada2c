from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import ResultTable, in_turns, publish, spread_table

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


def test_every_arm_has_its_turn_in_each_repetition_and_who_goes_first_alternates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = list(in_turns(("a", "b", "c"), 3))
    assert [arm for _, arm in turns] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [number for number, _ in turns] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert "[bench] repetition 2 of 3: c" in capsys.readouterr().out


def test_a_row_tells_the_median_and_quartiles_of_every_column() -> None:
    columns = {"seconds": (1, lambda run: float(run)), "twice": (2, lambda run: 2.0 * run)}
    table = spread_table("Runs", "arm", {"ours": [1, 2, 3, 4, 5], "theirs": [7]}, columns)
    assert table.columns == ("arm", "seconds", "twice")
    assert table.rows == [
        ("ours", "3.0 (2.0..4.0)", "6.00 (4.00..8.00)"),
        ("theirs", "7.0 (7.0..7.0)", "14.00 (14.00..14.00)"),
    ]
