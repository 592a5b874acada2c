"""Rates, ages and recommended settings from timed calls, checked against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.doctor.data import samples_per_pack
from swift_stage2.doctor.examination import Verdict
from swift_stage2.doctor.feeding import (
    Feeding,
    check_age,
    check_need,
    check_rate,
    check_settings,
    recommended,
)

# 4 packs of 5 samples on 2 ranks: 40 rollouts a B step, 10 a step; two servers of 16 in 4 s: 8 rollouts/s.
FEEDING = Feeding(
    b_ratio=Fraction(1, 4),
    packs_per_b_step=4,
    num_ranks=2,
    num_servers=2,
    max_inflight_per_server=16,
    version_window=2,
    sync_every_steps=4,
    queue_limit=12,
    prefetch_target_packs=4,
    samples_per_pack=5.0,
    num_rows=1000,
    single_s=1.0,
    batch_s=4.0,
    rollouts_per_s=8.0,
)


def test_the_need_is_counted_over_packs_ranks_and_samples() -> None:
    found = check_need(FEEDING).found
    for part in (
        "4 packs * 2 rank(s) * 5.0 samples a pack = 40 rollouts",
        "10.0 per step",
        "8.00 rollouts/s",
    ):
        assert part in found


def test_a_production_is_a_ranks_share_or_its_target() -> None:
    assert FEEDING.prompts_per_post == 16  # 16 * 2 servers / 2 ranks; the target would be 20
    assert FEEDING.production_s == pytest.approx(4.0)
    few = replace(FEEDING, max_inflight_per_server=64)
    assert few.prompts_per_post == 20
    assert few.production_s == pytest.approx(1.0 + 3.0 * 19 / 63)


def test_a_pack_of_more_samples_than_a_post_asks_for_takes_several_posts() -> None:
    large = replace(FEEDING, samples_per_pack=64.0)
    assert (large.prompts_per_post, large.posts_per_production, large.packs_per_production) == (16, 4, 1)
    assert large.production_s == pytest.approx(4 * 4.0)
    assert "4 POSTs of 16 rollouts fill 1 pack(s) in 16.00 s" in check_rate(large, None).found
    assert "16.00 s / 1 s = 16.0 steps" in check_age(large, 1.0).found
    assert check_age(large, 1.0).verdict is Verdict.WARNING, "after one POST of 4 s it would seem fresh"
    assert large.shortest_step_s > 3.9 * FEEDING.shortest_step_s


def test_the_reason_for_a_window_does_not_contradict_it() -> None:
    found = check_settings(FEEDING, 20.0).found
    assert "version_window 2 (packs of age 0.2 steps / sync_every_steps 4 need 1; as written)" in found
    assert (
        "version_window 4 (packs of age 16.0 steps / sync_every_steps 4 need 4)"
        in check_settings(FEEDING, 0.25).found
    )


def test_without_a_step_time_the_shortest_one_that_works_is_told() -> None:
    outcome = check_rate(FEEDING, None)
    assert outcome.verdict is Verdict.OK
    assert FEEDING.shortest_step_s >= 10 / 8  # by rate alone
    assert f"a step takes {FEEDING.shortest_step_s:.2f} s or more" in outcome.found
    assert "--step-seconds S" in outcome.found


@given(st.floats(0.05, 1.0), st.integers(1, 8), st.floats(0.1, 60.0), st.floats(1.0, 40.0))
def test_from_the_shortest_step_on_production_keeps_up_by_rate(
    b_ratio: float, packs: int, batch_s: float, per_pack: float
) -> None:
    feeding = replace(
        FEEDING,
        b_ratio=Fraction(repr(b_ratio)),
        packs_per_b_step=packs,
        prefetch_target_packs=packs,
        samples_per_pack=per_pack,
        num_rows=1000,
        single_s=batch_s,
        batch_s=batch_s,
        rollouts_per_s=32 / batch_s,
    )
    shortest = feeding.shortest_step_s
    assert feeding.load(1.0001 * shortest) <= 1.001
    assert feeding.rollouts_per_step / shortest <= feeding.rollouts_per_s * 1.001


def test_a_slow_step_is_fed_a_fast_one_starves_with_the_fix() -> None:
    assert check_rate(FEEDING, 10.0).verdict is Verdict.OK
    tight = check_rate(FEEDING, FEEDING.shortest_step_s / 1.5)
    assert tight.verdict is Verdict.WARNING
    starving = check_rate(FEEDING, 0.1)
    assert starving.verdict is Verdict.FAILED
    assert "needed 100.00 rollouts/s, available 8.00" in starving.found
    assert "such servers, or write stage2_ab.schedule.b_ratio: " in starving.fix
    assert "max_inflight_per_server" not in starving.fix, (
        "16 at once take four times as long as one: it is full"
    )
    roomy = check_rate(replace(FEEDING, single_s=3.9), 0.1)
    assert roomy.fix.startswith("write rollout.max_inflight_per_server: ")


def test_packs_older_than_the_window_are_told_with_the_window_they_need() -> None:
    assert check_age(FEEDING, 1.0).verdict is Verdict.OK  # 4 steps of 8
    old = check_age(FEEDING, 0.25)  # 16 steps
    assert old.verdict is Verdict.WARNING
    assert "4.00 s / 0.25 s = 16.0 steps" in old.found
    assert old.fix == (
        "write stage2_ab.channel_b.prefetch.version_window: 4, or a larger "
        "stage2_ab.channel_b.prefetch.sync_every_steps"
    )
    assert "if a step takes 0.50 s or more" in check_age(FEEDING, None).found
    assert check_age(replace(FEEDING, version_window=0), None).verdict is Verdict.OK


def test_staged_rounds_let_production_go_on_and_pass_a_post_once_at_most() -> None:
    """Rollouts of 4 s and steps of 3: a fenced round every step waits for the POST, which the next one follows."""
    fenced = replace(FEEDING, sync_every_steps=1, version_window=1, b_ratio=Fraction(1, 2))
    staged = replace(fenced, rounds_are_staged=True)
    assert (fenced.load(3.0), staged.load(3.0)) == pytest.approx((4 / 3, 8 / 9), rel=1e-6)
    assert check_rate(fenced, 3.0).verdict is Verdict.WARNING
    assert check_rate(staged, 3.0).verdict is Verdict.OK
    assert "with staged rounds in between" in check_rate(staged, 3.0).found
    assert staged.shortest_step_s < fenced.shortest_step_s
    assert (check_age(fenced, 1.0).verdict, check_age(staged, 1.0).verdict) == (Verdict.WARNING, Verdict.OK)
    assert (recommended(fenced, 1.0)["version_window"], recommended(staged, 1.0)["version_window"]) == (4, 1)
    assert "pass a production 1 time(s) at most" in check_age(staged, None).found
    two_posts = replace(staged, samples_per_pack=20.0)
    assert check_age(two_posts, 1.0).fix.startswith("write stage2_ab.channel_b.prefetch.version_window: 2")


def test_recommended_values_follow_from_the_measurement() -> None:
    assert recommended(FEEDING, None) == {"max_inflight_per_server": 20}  # 40 rollouts over two servers
    wanted = recommended(FEEDING, 0.5)  # a production spans 8 steps: two B steps
    assert (wanted["prefetch_target_packs"], wanted["version_window"]) == (8, 2)
    assert wanted["queue_limit"] == 12
    outcome = check_settings(FEEDING, 0.5)
    assert outcome.verdict is Verdict.WARNING
    assert "prefetch_target_packs: 8 (now 4)" in outcome.fix
    assert "queue_limit" not in outcome.fix
    enough = replace(FEEDING, max_inflight_per_server=64, rollouts_per_s=32.0)
    assert check_settings(enough, 4.0).verdict is Verdict.OK


def test_samples_per_pack_are_those_of_the_real_packing() -> None:
    assert samples_per_pack([50], 256) == 5.0
    assert samples_per_pack([100, 156], 256) == 2.0
    assert samples_per_pack([200], 256) == 1.0


def test_samples_per_pack_are_those_of_a_long_run() -> None:
    lengths = [40, 60, 70, 90, 110, 120, 130, 140, 150, 170, 190, 210, 240, 300, 380, 500]
    mean = sum(lengths) / len(lengths)
    assert samples_per_pack(lengths, 4096) == pytest.approx(4096 / mean, rel=0.05)


def test_a_b_step_that_asks_for_more_than_all_rows_says_how_often() -> None:
    assert "rows" not in check_need(FEEDING).found
    told = check_need(replace(FEEDING, num_rows=16))
    assert told.found.endswith("the data has 16 rows: one B step asks for each 2.5 times")
    assert "packing_length" in (told.fix or "")
