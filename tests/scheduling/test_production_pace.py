from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.production_pace import RECENT_PRODUCTIONS, ProductionMeter, ProductionPace


def test_nothing_is_known_before_the_first_production() -> None:
    assert ProductionMeter().pace is None


def test_typical_is_the_median_and_quick_the_lower_decile() -> None:
    meter = ProductionMeter()
    for steps in (9.0, 3.0, 4.0, 2.0, 5.0):
        meter.observe(steps)
    assert meter.pace == ProductionPace(typical_steps=4.0, quick_steps=2.0)


def test_forgets_what_is_long_past() -> None:
    meter = ProductionMeter()
    meter.observe(1000.0)
    for _ in range(RECENT_PRODUCTIONS):
        meter.observe(2.0)
    assert meter.pace == ProductionPace(2.0, 2.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_quick_is_never_slower_than_typical(steps: list[float]) -> None:
    meter = ProductionMeter()
    for taken in steps:
        meter.observe(taken)
    assert meter.pace is not None
    assert min(steps) <= meter.pace.quick_steps <= meter.pace.typical_steps <= max(steps)


def test_the_slower_of_two_paces_number_by_number() -> None:
    assert ProductionPace(3.0, 1.0).slower(ProductionPace(2.0, 2.0)) == ProductionPace(3.0, 2.0)
    assert ProductionPace.of(3.0, None) == ProductionPace(3.0, 3.0)


@pytest.mark.parametrize("steps", [-1.0, math.nan, math.inf])
def test_refuses_a_time_that_cannot_be(steps: float) -> None:
    with pytest.raises(ValueError, match="got steps="):
        ProductionMeter().observe(steps)
