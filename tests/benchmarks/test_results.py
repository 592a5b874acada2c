from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import ResultTable, in_turns, publish, spread_table

TABLE = ResultTable("Times", ("what", "ms"), (("plan", "1.0"), ("a|b", "2.0")))


def test_results_are_printed_and_written_below_what_was_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, "times", TABLE, "All of it.")
    stamp, _, rest = (tmp_path / "times.md").read_text().partition("\n")
    assert stamp.startswith("`swift-stage2 bench times")
    assert "cores; torch " in stamp
    assert rest == (
        "\nTimes\n\n| what | ms  |\n| ---- | --- |\n| plan | 1.0 |\n| a/b  | 2.0 |\n\nAll of it.\n"
    )
    printed = capsys.readouterr().out
    assert rest in printed
    assert f"{tmp_path}/times.md" in printed


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
