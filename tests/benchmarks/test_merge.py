"""Rates and ratios of the merge bench: what is compared with what."""

from __future__ import annotations

import json

from benchmarks import merge
from benchmarks.merge import Cell, merge_table, ratios_to_single_call


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
    table = merge_table(CELLS)
    assert table.columns == ("system", "1 rank", "4 ranks")
    assert table.rows[0] == ("a", "40.0", "24.0 (0.75; 0.62..0.88)")  # the median of 64/1 and 64/4


def test_every_rank_gets_its_own_share_and_seed() -> None:
    pictures = iter(range(100))
    bodies = [json.loads(body) for body in merge._bodies(pictures, 8, 4)]
    assert [len(body["infer_requests"]) for body in bodies] == [2, 2, 2, 2]
    images = [request["images"][0] for body in bodies for request in body["infer_requests"]]
    assert len(set(images)) == 8
    assert len({body["request_config"]["seed"] for body in bodies}) == 4
    assert next(pictures) == 8  # no picture comes twice
