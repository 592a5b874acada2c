from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.bresenham import next_wanted_step, wanted_count, wants_channel_b

ratios = st.decimals(min_value=0, max_value=1, places=4).map(float)
positive_ratios = st.decimals(min_value="0.0001", max_value=1, places=4).map(float)
steps = st.integers(min_value=0, max_value=10**12)


@pytest.mark.parametrize(
    ("b_ratio", "wanted"),
    [
        (0, []),
        (0.05, [19]),
        (0.2, [4, 9, 14, 19]),
        (0.3, [3, 6, 9, 13, 16, 19]),
        (0.5, list(range(1, 20, 2))),
        (1, list(range(20))),
        (1.0, list(range(20))),
    ],
)
def test_worked_schedules(b_ratio: float, wanted: list[int]) -> None:
    assert [step for step in range(20) if wants_channel_b(step, b_ratio)] == wanted


@given(ratio=ratios, step=steps)
def test_follows_the_definition_in_fractions(ratio: float, step: int) -> None:
    exact = Fraction(str(ratio))
    assert wants_channel_b(step, ratio) == (floor((step + 1) * exact) > floor(step * exact))


@given(ratio=ratios, start=steps, length=st.integers(min_value=0, max_value=200))
def test_any_stretch_holds_its_exact_share(ratio: float, start: int, length: int) -> None:
    counted = sum(wants_channel_b(step, ratio) for step in range(start, start + length))
    assert counted == wanted_count(start + length, ratio) - wanted_count(start, ratio)


@pytest.mark.parametrize("ratio", [0.85, 0.3, 0.1, 0.07, 0.9999])
def test_a_thousand_million_steps_lose_nothing(ratio: float) -> None:
    assert wanted_count(10**9, ratio) == floor(10**9 * Fraction(str(ratio)))
    assert wanted_count(10**9 + 1, ratio) - wanted_count(10**9, ratio) == wants_channel_b(10**9, ratio)


@given(ratio=positive_ratios, step=steps)
def test_next_wanted_step_is_wanted_and_skips_none(ratio: float, step: int) -> None:
    following = next_wanted_step(step, ratio)
    assert following is not None
    assert following >= step
    assert wants_channel_b(following, ratio)
    assert wanted_count(following, ratio) == wanted_count(step, ratio)


def test_nothing_is_wanted_next_without_channel_b() -> None:
    assert next_wanted_step(7, 0) is None


def test_a_tiny_ratio_in_scientific_notation_is_exact() -> None:
    assert next_wanted_step(0, 1e-7) == 10**7 - 1
