from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.outlook import (
    RECENT_PRODUCTIONS,
    Outlook,
    PacingState,
    ProductionMeter,
    ProductionPace,
    RoundForecast,
    first_step_after,
)

AT_STEP_10 = PacingState(
    step=10, progress=0.25, current_version=5, last_commit_step=9, pace=ProductionPace(3.0, 3.0)
)


@pytest.mark.parametrize(("position", "step"), [(3.0, 4), (3.99, 4), (4.0, 5), (-1.0, 0)])
def test_a_step_starts_strictly_after_the_position(position: float, step: int) -> None:
    assert first_step_after(position) == step


@given(
    rounds=st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True).map(sorted),
    spacing=st.integers(1, 7),
    step=st.integers(0, 80),
)
def test_a_forecast_counts_rounds_one_by_one(rounds: list[int], spacing: int, step: int) -> None:
    run_at = set(rounds) | set(range(rounds[-1], 200, spacing))
    expected = 100 + sum(at <= step for at in run_at)
    assert RoundForecast(100, tuple(rounds), spacing).version_at(step) == expected


def test_idle_rounds_follow_the_last_commit() -> None:
    outlook = Outlook(AT_STEP_10, sync_every_steps=4, spacing=4)
    assert outlook.rounds_if_idle() == RoundForecast(5, (13,), 4)


def test_a_production_holds_the_round_until_it_ends() -> None:
    outlook = Outlook(AT_STEP_10, sync_every_steps=1, spacing=1)
    assert outlook.arrival == 14  # 10.25 + 3 ends within step 13
    assert outlook.rounds_if_made(3.0) == RoundForecast(5, (14,), 1)
    assert outlook.rounds_if_made(0.5) == RoundForecast(5, (11,), 1)


def test_a_post_asked_for_in_a_pending_round_starts_after_it() -> None:
    outlook = Outlook(replace(AT_STEP_10, round_pending=True), sync_every_steps=2, spacing=2)
    assert (outlook.start, outlook.version_at_start, outlook.arrival) == (11, 6, 15)
    assert outlook.rounds_if_idle() == RoundForecast(5, (11,), 2)
    # 11 + 3 may end just before step 14 starts (its round ages the packs) or just after (they arrive at 15).
    assert outlook.rounds_if_made(3.0) == RoundForecast(5, (11, 14), 2)


def test_rounds_are_held_by_the_slowest_rank_and_packs_arrive_at_the_own_pace() -> None:
    state = replace(AT_STEP_10, pace=ProductionPace(0.5, 0.5), slowest_pace=ProductionPace(6.0, 6.0))
    assert Outlook(state, 1, 1).arrival == 11
    assert state.holding_pace.typical_steps == 6.0


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


@pytest.mark.parametrize("steps", [-1.0, math.nan, math.inf])
def test_refuses_a_time_that_cannot_be(steps: float) -> None:
    with pytest.raises(ValueError, match="got steps="):
        ProductionMeter().observe(steps)
