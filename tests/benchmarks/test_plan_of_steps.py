"""The plan bench: what is a pair, what the budgets are compared with, and two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.plan import PlanCell, cells_of, own_table, plan_table, rank_table


def _cell(num_ranks: int, limit: int, *, plan_s: float, bare_s: float, own_s: float = 1e-5) -> PlanCell:
    return PlanCell(
        num_ranks=num_ranks, queue_limit=limit, plan=[plan_s] * 3, bare=[bare_s] * 3, own=[own_s] * 6
    )


def test_a_pair_counts_as_its_slowest_rank_and_own_code_as_every_rank() -> None:
    ranks = [
        {"8": {"plan_s": [1.0, 4.0], "bare_s": [1.0, 1.0], "own_s": [0.1, 0.2]}},
        {"8": {"plan_s": [3.0, 2.0], "bare_s": [1.0, 2.0], "own_s": [0.3, 0.4]}},
    ]
    (cell,) = cells_of(ranks)
    assert (cell.num_ranks, cell.queue_limit) == (2, 8)
    assert (cell.plan, cell.bare, cell.ratios) == ([3.0, 4.0], [1.0, 2.0], [3.0, 2.0])
    assert sorted(cell.own) == [0.1, 0.2, 0.3, 0.4]


def test_the_budget_in_milliseconds_is_for_two_ranks_and_the_ratio_for_all() -> None:
    cells = [_cell(2, 8, plan_s=0.0021, bare_s=0.002), _cell(4, 8, plan_s=0.014, bare_s=0.010)]
    two, four = plan_table(cells).rows
    assert two[-1] == "2 ms: missed, ratio 1.3: held"
    assert four[-1] == "ratio 1.3: missed"


def test_the_exponent_is_of_own_code_over_the_queue_limit() -> None:
    cells = [_cell(2, limit, plan_s=1.0, bare_s=1.0, own_s=1e-6 * limit**2) for limit in (8, 64, 512)]
    assert own_table(cells).rows == [("2", "8, 64, 512", "2.00")]
    assert own_table(cells[:1]).rows[0][-1] == "one limit only"


def test_exponents_over_ranks_are_of_each_queue_limit_by_itself() -> None:
    cells = [
        _cell(ranks, limit, plan_s=1e-3 * ranks**2, bare_s=1e-3 * ranks, own_s=1e-6)
        for ranks in (2, 4, 8)
        for limit in (8, 64)
    ]
    row = ("2, 4, 8", "2.00", "1.00", "0.00")
    assert rank_table(cells).rows == [("8", *row), ("64", *row)]
    assert rank_table(cells[:1]).rows[0][-1] == "one number only"


@pytest.mark.slow
def test_two_real_ranks_give_every_pair_of_every_queue_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["--ranks", "2", "--queue-limits", "4", "16", "--repeats", "5", "--output", str(out)]
    assert command.main(["plan", *argv]) == 0
    cells = json.loads((out / "plan.json").read_text())["cells"]
    assert [(cell["num_ranks"], cell["queue_limit"]) for cell in cells] == [(2, 4), (2, 16)]
    for cell in cells:
        assert len(cell["plan"]) == len(cell["bare"]) == 5
        assert len(cell["own"]) == 10
        assert all(0 < own < whole for own, whole in zip(cell["own"][:5], cell["plan"], strict=True))
    assert "| 2 | 4 | " in (out / "plan.md").read_text()
    assert "bare all-reduce" in capsys.readouterr().out
