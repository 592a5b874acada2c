"""Packing against every possible pack."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.packing import decide_pack, select_pack
from swift_stage2.errors import PackingError


@given(
    st.integers(1, 30).flatmap(
        lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=9), st.just(c))
    )
)
def test_as_full_as_any_possible_pack(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    totals = [
        lengths[0] + sum(rest) for count in range(len(lengths)) for rest in combinations(lengths[1:], count)
    ]
    chosen = select_pack(lengths, capacity)
    assert chosen == tuple(sorted({0, *chosen}))
    assert sum(lengths[index] for index in chosen) == max(total for total in totals if total <= capacity)


def test_hundreds_of_segments_fill_a_large_pack_to_the_token() -> None:
    lengths = np.random.default_rng(0).integers(200, 9000, 400).tolist()
    chosen = select_pack(lengths, 32768)
    assert sum(lengths[index] for index in chosen) == 32768
    assert chosen[0] == 0


def test_older_segments_go_first_among_equals() -> None:
    assert select_pack([60] * 30, 512) == tuple(range(8))
    assert select_pack([6, 2, 3, 2], 10) == (0, 1, 3)


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([11], 10, r"\[0\]=11 capacity=10"),
        ([1, 2, 11], 10, r"\[2\]=11 capacity=10"),
        ([], 10, r"lengths=\[\]"),
        ([3, 0], 10, r"\[1\]=0"),
        ([-3], 10, r"\[0\]=-3"),
    ],
)
def test_what_cannot_be_packed_is_named(lengths: Any, capacity: Any, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        select_pack(lengths, capacity)


@pytest.mark.parametrize(
    ("lengths", "min_fill_ratio", "starving", "expected"),
    [
        ([], 0.5, True, None),
        ([4], 0.5, False, None),
        ([4], 0.5, True, (0,)),
        ([5], 0.5, False, (0,)),
        ([7], 0.7, False, (0,)),  # 0.7 * 10 is above 7 in floating point
        ([6, 3, 2, 2], 1.0, False, (0, 2, 3)),
        ([6, 3], 1.0, False, None),
        ([1], 0.0, False, (0,)),
    ],
)
def test_a_thin_pack_waits_unless_the_queue_starves(
    lengths: list[int], min_fill_ratio: float, starving: bool, expected: tuple[int, ...] | None
) -> None:
    assert decide_pack(lengths, 10, min_fill_ratio, starving) == expected
