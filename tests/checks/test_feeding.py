"""Rates, ages and recommended settings from timed calls, checked against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.checks.checks import Verdict
from swift_stage2.checks.rollouts import Feeding, check_rate, check_settings

# 4 packs of 5 samples on 2 ranks: 40 rollouts a B step, 10 a step; two servers of 16 in 4 s: 8 rollouts/s.
FEEDING = Feeding(
    b_ratio=Fraction(1, 4),
    packs_per_b_step=4,
    num_ranks=2,
    num_servers=2,
    max_inflight_per_server=16,
    version_window=2,
    sync_every_steps=4,
    samples_per_pack=5.0,
    batch_s=4.0,
    rollouts_per_s=8.0,
)


@given(st.floats(0.05, 1.0), st.integers(1, 8), st.floats(0.1, 60.0), st.floats(1.0, 40.0))
def test_from_the_shortest_step_on_the_servers_keep_up(
    b_ratio: float, packs: int, rate: float, per_pack: float
) -> None:
    feeding = replace(
        FEEDING,
        b_ratio=Fraction(repr(b_ratio)),
        packs_per_b_step=packs,
        samples_per_pack=per_pack,
        rollouts_per_s=rate,
    )
    shortest = feeding.shortest_step_s
    assert feeding.rollouts_per_step / shortest == pytest.approx(rate)
    assert feeding.load(1.0001 * shortest) < 1 < feeding.load(0.9999 * shortest)


def test_a_slow_step_is_fed_and_a_fast_one_starves() -> None:
    untold = check_rate(FEEDING, None)
    assert untold.verdict is Verdict.OK
    assert "4 packs * 2 rank(s) * 5.0 samples a pack = 40 rollouts, 10.0 per step" in untold.found
    assert "steps of 1.25 s or more" in untold.found  # 10 rollouts at 8/s
    assert check_rate(FEEDING, 10.0).verdict is Verdict.OK
    assert check_rate(FEEDING, 1.0).verdict is Verdict.WARNING
    starving = check_rate(FEEDING, 0.1)
    assert starving.verdict is Verdict.FAILED
    assert "packs arrive 40.0 steps old" in starving.found


def test_packs_that_are_too_old_when_they_arrive_are_told() -> None:
    """POSTs of 4 s, steps of 1.25 s and a version every step that waits for 16 at most."""
    feeding = replace(FEEDING, sync_every_steps=1, max_inflight_per_server=64)
    assert (check_rate(feeding, 1.25).verdict, check_settings(feeding, 1.25).verdict) == (Verdict.OK,) * 2
    slow = replace(feeding, batch_s=64.0)  # 51.2 steps
    assert check_rate(slow, 1.25).verdict is Verdict.WARNING
    assert check_settings(slow, 1.25).fix == "write stage2_ab.channel_b.prefetch.version_window: 4 (now 2)"
    # 200 samples a pack and 64 slots for each of two ranks: four POSTs one after another
    assert replace(slow, samples_per_pack=200.0).versions_passed(1.25) == 13


def test_what_is_advised_follows_from_the_measurement() -> None:
    slots = "rollout.max_inflight_per_server: 20 (now 16)"  # 40 rollouts over two servers
    assert check_settings(FEEDING, None).fix == check_settings(FEEDING, 20.0).fix == f"write {slots}"
    # Steps of half a second need 20 rollouts/s of 8: 2.5 times as many slots, or B steps 2.5 times as rare.
    assert check_settings(FEEDING, 0.5).fix == (
        "write rollout.max_inflight_per_server: 40 (now 16), stage2_ab.schedule.b_ratio: 0.1 (now 0.25)"
    )
    enough = replace(FEEDING, max_inflight_per_server=64, rollouts_per_s=32.0)
    assert check_settings(enough, 4.0).verdict is Verdict.OK
