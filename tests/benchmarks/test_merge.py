"""Rates and ratios of the merge bench: what is compared with what."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import merge
from benchmarks.merge import Cell, merge_table, ratios_to_single_call
from swift_stage2.errors import UserError


def _cell(system: str, num_ranks: int, repetition: int, seconds: float) -> Cell:
    return Cell(system, num_ranks, repetition, seconds, num_requests=64, num_tokens=1000)


CELLS = [
    _cell("a", 1, 0, 1.0),
    _cell("a", 4, 0, 2.0),
    _cell("a", 1, 1, 4.0),
    _cell("a", 4, 1, 4.0),
    _cell("b", 1, 0, 2.0),
    _cell("b", 4, 0, 1.0),
]


def test_a_rate_is_compared_with_the_single_call_of_its_own_system_and_repetition() -> None:
    assert ratios_to_single_call(CELLS, "a", 4) == [0.5, 1.0]
    assert ratios_to_single_call(CELLS, "b", 4) == [2.0]
    assert ratios_to_single_call(CELLS[1:], "a", 4) == [
        1.0
    ]  # a repetition without its single call tells nothing


def test_the_table_shows_median_rates_and_ratios_with_quartiles() -> None:
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(merge_table(CELLS))
    lines = captured.get().splitlines()
    (row,) = [line for line in lines if "│ a " in line]
    assert "40.0" in row  # median of 64/1 and 64/4
    assert "24.0 (0.75; 0.62..0.88)" in row


def test_every_rank_gets_its_own_share_and_seed() -> None:
    pictures = iter(range(100))
    bodies = [json.loads(body) for body in merge._bodies(pictures, 8, 4)]
    assert [len(body["infer_requests"]) for body in bodies] == [2, 2, 2, 2]
    images = [request["images"][0] for body in bodies for request in body["infer_requests"]]
    assert len(set(images)) == 8
    assert len({body["request_config"]["seed"] for body in bodies}) == 4
    assert next(pictures) == 8  # no picture comes twice


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--requests", "10", "--ranks", "4"], "requests=10"), (["--repeats", "0"], "repeats=0")],
)
def test_options_that_make_no_measurement_are_refused(argv: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        merge._parse(argv)
