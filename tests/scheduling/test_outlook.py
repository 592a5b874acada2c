from __future__ import annotations

import math
import time
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
    StepView,
    first_step_after,
    packs_of,
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


STAGED = replace(AT_STEP_10, rounds_are_staged=True, last_commit_step=7)


def test_a_staged_round_counts_from_the_step_after_the_one_that_hears_it() -> None:
    outlook = Outlook(STAGED, sync_every_steps=4, spacing=4)
    assert (outlook.start, outlook.version_at_start, outlook.arrival) == (10.25, 5, 14)
    # Due at 11, heard in 11 at the earliest; the next one is due at 15.
    assert outlook.rounds_if_idle() == RoundForecast(5, (12, 16), 4)


def test_a_production_holds_no_staged_round_but_the_next_one_begins_after_it() -> None:
    outlook = Outlook(STAGED, sync_every_steps=1, spacing=1)
    assert outlook.rounds_if_idle() == RoundForecast(5, (12, 13), 1)
    # Made until 13.25: its server is heard in 14, the next round begins at 15 and counts from 16.
    assert outlook.rounds_if_made(3.0) == RoundForecast(5, (12, 16), 1)
    assert outlook.rounds_if_made(0.5) == RoundForecast(5, (12, 13), 1)


@pytest.mark.parametrize(("last_commit_step", "second"), [(7, 15), (5, 14), (2, 13)])
def test_the_cadence_counts_from_the_snapshot_of_a_round_in_transfer(
    last_commit_step: int, second: int
) -> None:
    """It began four steps after the one before, at 10 at the latest; the next one begins at 14, at 13, and at once."""
    state = replace(STAGED, round_in_transfer=True, last_commit_step=last_commit_step)
    forecast = Outlook(state, sync_every_steps=4, spacing=4).rounds_if_idle()
    assert forecast == RoundForecast(5, (12, second), 4)


def test_a_fenced_round_that_is_pending_among_staged_ones_is_forecast_as_fenced() -> None:
    fenced = replace(STAGED, round_pending=True)
    assert Outlook(fenced, 2, 2).rounds_if_made(3.0) == RoundForecast(5, (11, 14), 2)
    assert Outlook(fenced, 2, 2).version_at_start == 6


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


@given(
    rollouts=st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 50.0)), max_size=40),
    per_pack=st.floats(1.0, 9.0),
)
def test_rollouts_make_packs_in_the_order_in_which_they_come(
    rollouts: list[tuple[int, float]], per_pack: float
) -> None:
    packs, num_over = packs_of(rollouts, per_pack)
    assert len(packs) == int(len(rollouts) / per_pack)
    assert 0 <= num_over <= per_pack
    assert [pack.arrival for pack in packs] == sorted(pack.arrival for pack in packs)
    assert all(any(pack.version == version for version, _ in rollouts) for pack in packs)


def test_a_pack_in_the_making_is_as_old_as_its_oldest_and_comes_with_its_last() -> None:
    packs, num_over = packs_of([(3, 12.0), (1, 11.0), (2, 10.0), (3, 13.0), (3, 20.0)], 2.0)
    assert [(pack.version, pack.arrival) for pack in packs] == [(1, 11.0), (3, 13.0)]
    assert num_over == 1


def test_what_is_out_holds_the_rounds_although_nothing_is_begun() -> None:
    (pack,), _ = packs_of([(5, 14.5)], 1.0)
    outlook = Outlook(replace(AT_STEP_10, in_making=(pack,)), sync_every_steps=1, spacing=1)
    assert outlook.rounds_if_idle() == RoundForecast(5, (15,), 1)
    staged = replace(outlook.state, rounds_are_staged=True)
    assert Outlook(staged, sync_every_steps=1, spacing=1).rounds_if_idle().rounds == (12, 17)


def test_a_rollout_that_is_late_is_expected_after_as_long_again() -> None:
    now_s = time.monotonic()
    view = StepView(AT_STEP_10, started_s=now_s, step_seconds=100.0, max_prompts=4, paused=False)
    assert view.arrival(AT_STEP_10, None) == pytest.approx(13.25)
    assert view.arrival(AT_STEP_10, now_s - 100.0) == pytest.approx(12.25, abs=0.1)
    assert view.arrival(AT_STEP_10, now_s - 500.0) == pytest.approx(12.25, abs=0.1)
