from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.bresenham import next_wanted_step
from swift_stage2.scheduling.horizon import (
    RECENT_PRODUCTIONS,
    Pacer,
    PacerInputs,
    PackInMaking,
    ProductionMeter,
    StepView,
    max_prompts_in_flight,
    packs_of,
)

# B is wanted at 3, 7, 11, …; a round precedes every step.
PACER = Pacer(b_ratio=0.25, version_window=2, sync_every_steps=1, target_packs=4, packs_per_b_step=4)


def after_round(
    step: int, *, production_steps: float | None = 0.0, ready: tuple[int, ...] = ()
) -> PacerInputs:
    """Just after the start of ``step``; one round has run at every step, so version and step are equal."""
    return PacerInputs(
        step=step,
        progress=0.1,
        current_version=step,
        ready_versions=ready,
        typical_steps=production_steps,
    )


@pytest.mark.parametrize(("step", "num_packs"), [(3, 0), (4, 0), (5, 4), (6, 4), (7, 0)])
def test_instant_packs_are_made_within_the_window_of_their_step(step: int, num_packs: int) -> None:
    assert PACER.decide(after_round(step)) == num_packs


@pytest.mark.parametrize(("window", "first"), [(1, 6), (2, 5), (3, 4), (4, 3)])
def test_the_window_says_how_early(window: int, first: int) -> None:
    pacer = replace(PACER, version_window=window)
    made = [step for step in range(3, 7) if pacer.decide(after_round(step))]
    assert made == list(range(first, 7))


def test_a_slow_production_starts_as_late_as_it_may() -> None:
    assert PACER.decide(after_round(3, production_steps=3.0)) == 4


def test_packs_in_the_making_are_not_made_twice() -> None:
    """They count from the step on that can reserve them, as old as what they are made of."""
    state = after_round(5)
    assert PACER.decide(state) == 4
    here = (PackInMaking(5, state.position),) * 3
    assert PACER.decide(replace(state, in_making=here)) == 1
    late = (PackInMaking(5, 8.5),) * 3  # B is wanted at 7
    assert PACER.decide(replace(state, in_making=late)) == 4, "they come too late for that step"
    stale = (PackInMaking(2, state.position),) * 3
    assert PACER.decide(replace(state, in_making=stale)) == 4
    whole = (PackInMaking(5, state.position),) * 4
    assert PACER.decide(replace(state, in_making=whole)) == 0


def test_too_late_for_one_step_and_too_early_for_the_next() -> None:
    pacer = replace(PACER, b_ratio=0.1)  # wanted at 9, 19, …
    assert pacer.decide(after_round(7, production_steps=3.0)) == 0
    assert pacer.decide(after_round(4, production_steps=3.0)) == 4
    assert pacer.decide(after_round(1, production_steps=3.0)) == 0


def test_fresh_packs_count_and_stale_ones_do_not() -> None:
    assert PACER.decide(after_round(6, ready=(5, 5, 5, 5))) == 0
    assert PACER.decide(after_round(6, ready=(3, 3, 5, 5))) == 2


def test_a_second_step_is_served_only_where_packs_stay_fresh_so_long() -> None:
    target_8 = replace(PACER, target_packs=8)
    assert target_8.decide(after_round(6)) == 4
    rare_rounds = replace(target_8, sync_every_steps=8)
    assert rare_rounds.decide(after_round(6)) == 8


def test_an_unmeasured_production_is_started_to_be_measured() -> None:
    assert PACER.decide(after_round(0, production_steps=None)) == 4


def test_missed_steps_end_the_trust_in_the_forecast() -> None:
    early = after_round(3)
    assert PACER.decide(replace(early, missed_in_a_row=1)) == 0
    assert PACER.decide(replace(early, missed_in_a_row=2)) == 4


@pytest.mark.parametrize("blind", [{"typical_steps": None}, {"missed_in_a_row": 9}])
def test_a_decision_without_forecast_fills_the_target_once(blind: dict[str, int | None]) -> None:
    """Packs that the forecast calls useless count all the same: an instant server must not be asked for ever."""
    early = replace(after_round(3), **blind)
    assert PACER.decide(early) == 4
    assert PACER.decide(replace(early, ready_versions=(3, 3, 1))) == 1
    assert PACER.decide(replace(early, ready_versions=(3,) * 4)) == 0


def test_no_channel_b_no_packs() -> None:
    off = replace(PACER, b_ratio=0)
    assert off.decide(after_round(3)) == 0
    assert not off.is_starving(after_round(3))


@pytest.mark.parametrize(
    ("ready", "starving"), [((6, 6, 6, 6), False), ((6, 6, 6), True), ((3, 6, 6, 6), True), ((), True)]
)
def test_starving_means_fewer_fresh_packs_than_the_next_step_needs(
    ready: tuple[int, ...], starving: bool
) -> None:
    assert PACER.is_starving(after_round(6, ready=ready)) is starving


@given(
    pacer=st.builds(
        Pacer,
        b_ratio=st.decimals("0.01", 1, places=2).map(float),
        version_window=st.integers(0, 4),
        sync_every_steps=st.integers(1, 8),
        target_packs=st.integers(4, 12),
        packs_per_b_step=st.integers(1, 4),
    ),
    state=st.builds(
        PacerInputs,
        step=st.integers(20, 60),
        progress=st.floats(0, 0.99),
        current_version=st.integers(5, 10),
        holds_production=st.booleans(),
        ready_versions=st.lists(st.integers(0, 11), max_size=12).map(tuple),
        typical_steps=st.none() | st.floats(0, 50),
        slow_steps=st.none() | st.floats(0, 500),
        missed_in_a_row=st.integers(0, 3),
    ),
)
def test_always_answers_within_the_target_and_never_refuses_for_good(
    pacer: Pacer, state: PacerInputs
) -> None:
    assert 0 <= pacer.decide(state) < pacer.target_packs + pacer.packs_per_b_step
    empty = replace(state, ready_versions=(), missed_in_a_row=2)
    assert pacer.decide(empty) > 0


def test_a_huge_step_and_a_huge_duration_are_answered_at_once() -> None:
    step = 10**12
    assert next_wanted_step(step, 0.25) is not None
    assert PACER.decide(after_round(step, production_steps=1e9)) == 4


@pytest.mark.parametrize(
    ("per_server", "proven", "world_size", "share"),
    [(16, 1, 1, 16), (16, 2, 3, 10), (16, 1, 32, 1), (16, 0, 4, 1)],
)
def test_each_rank_gets_its_share_of_the_servers(
    per_server: int, proven: int, world_size: int, share: int
) -> None:
    assert max_prompts_in_flight(per_server, proven, world_size) == share


AT_10 = PacerInputs(step=10, progress=0.25, current_version=5, typical_steps=3.0)


@pytest.mark.parametrize(
    ("inputs", "cadence", "horizon"),
    [
        (AT_10, 4, (14, 17)),  # 10.25 + 3 ends within step 13; the target lasts four steps
        (AT_10, 1, (14, 17)),  # longer than two versions last: what the next production cannot serve
        (replace(AT_10, slow_steps=5.0), 1, (14, 19)),  # one in ten takes longer than 5 steps
        (replace(AT_10, slow_steps=50.0), 1, (14, 64)),
        (replace(AT_10, typical_steps=0.5), 1, (11, 12)),
        (replace(AT_10, holds_production=True), 4, (15, 18)),
    ],
)
def test_the_horizon_is_from_arrival_to_the_end_of_the_windows_versions(
    inputs: PacerInputs, cadence: int, horizon: tuple[int, int]
) -> None:
    assert inputs.typical_steps is not None
    assert replace(PACER, sync_every_steps=cadence).horizon(inputs, inputs.typical_steps) == horizon


# --- what a rank measures, and what is out --------------------------------------------------------------


def test_typical_is_the_median_of_the_last_ones_and_slow_is_what_one_in_ten_exceeds() -> None:
    meter = ProductionMeter()
    assert (meter.typical_steps, meter.slow_steps) == (None, None)
    for steps in (9.0, 3.0, 4.0, 2.0, 5.0):
        meter.observe(steps)
    assert (meter.typical_steps, meter.slow_steps) == (4.0, 9.0)
    for _ in range(RECENT_PRODUCTIONS - 3):
        meter.observe(2.0)
    for _ in range(3):
        meter.observe(20.0)
    assert (meter.typical_steps, meter.slow_steps) == (2.0, 2.0)
    meter.observe(20.0)
    assert meter.slow_steps == 20.0


@given(
    rollouts=st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 50.0)), max_size=40),
    per_pack=st.floats(1.0, 9.0),
)
def test_rollouts_make_packs_in_the_order_in_which_they_come(
    rollouts: list[tuple[int, float]], per_pack: float
) -> None:
    packs, over = packs_of(rollouts, per_pack)
    assert len(packs) == int(len(rollouts) / per_pack)
    assert 0 <= len(over) <= per_pack
    assert [pack.arrival for pack in packs] == sorted(pack.arrival for pack in packs)
    assert all(any(pack.version == version for version, _ in rollouts) for pack in packs)


def test_a_pack_in_the_making_is_as_old_as_its_oldest_and_comes_with_its_last() -> None:
    packs, over = packs_of([(3, 12.0), (1, 11.0), (2, 10.0), (3, 13.0), (3, 20.0)], 2.0)
    assert [(pack.version, pack.arrival) for pack in packs] == [(1, 11.0), (3, 13.0)]
    assert over == (20.0,)


def test_a_rollout_that_is_late_is_expected_after_as_long_again() -> None:
    now_s = time.monotonic()
    view = StepView(AT_10, started_s=now_s, step_seconds=100.0, max_prompts=4, paused=False)
    assert view.arrival(AT_10, None) == pytest.approx(13.25)
    assert view.arrival(AT_10, now_s - 100.0) == pytest.approx(12.25, abs=0.1)
    assert view.arrival(AT_10, now_s - 500.0) == pytest.approx(12.25, abs=0.1)
