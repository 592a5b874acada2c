"""Rates, ages and recommended settings from timed calls, checked against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.checks.checks import Verdict
from swift_stage2.checks.feeding import Feeding, advise, check_rate, check_settings, sustained
from swift_stage2.checks.learner import samples_per_pack

# 4 packs of 5 samples on 2 ranks: 40 rollouts a B step, 10 a step; two servers of 16 in 4 s: 8 rollouts/s.
FEEDING = Feeding(
    b_ratio=Fraction(1, 4),
    packs_per_b_step=4,
    num_ranks=2,
    num_servers=2,
    max_inflight_per_server=16,
    version_window=2,
    sync_every_steps=4,
    prefetch_target_packs=4,
    samples_per_pack=5.0,
    single_s=1.0,
    batch_s=4.0,
    rollouts_per_s=8.0,
)


def proposed(feeding: Feeding, step_s: float | None) -> dict[str, float]:
    """What the adviser proposes, by the last part of its key."""
    return {each.knob.rpartition(".")[2]: float(each.proposed) for each in advise(feeding, step_s)}


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
        single_s=batch_s,
        batch_s=batch_s,
        rollouts_per_s=32 / batch_s,
    )
    shortest = feeding.shortest_step_s
    assert feeding.load(1.0001 * shortest) <= 1.001
    assert feeding.rollouts_per_step / shortest <= feeding.rollouts_per_s * 1.001


def test_a_slow_step_is_fed_and_a_fast_one_starves() -> None:
    untold = check_rate(FEEDING, None)
    assert untold.verdict is Verdict.OK
    assert "4 packs * 2 rank(s) * 5.0 samples a pack = 40 rollouts, 10.0 per step" in untold.found
    assert f"steps of {FEEDING.shortest_step_s:.2f} s or more" in untold.found
    assert FEEDING.shortest_step_s >= 10 / 8  # by rate alone
    assert check_rate(FEEDING, 10.0).verdict is Verdict.OK
    assert check_rate(FEEDING, FEEDING.shortest_step_s / 1.5).verdict is Verdict.WARNING
    starving = check_rate(FEEDING, 0.1)
    assert starving.verdict is Verdict.FAILED
    assert "packs arrive 40.0 steps old" in starving.found


def test_staged_rounds_let_production_go_on_and_pass_a_post_once_at_most() -> None:
    """Rollouts of 4 s and steps of 3: a fenced round every step waits for the POST, which the next one follows."""
    fenced = replace(FEEDING, sync_every_steps=1, version_window=1, b_ratio=Fraction(1, 2))
    staged = replace(fenced, rounds_are_staged=True)
    assert (fenced.load(3.0), staged.load(3.0)) == pytest.approx((4 / 3, 8 / 9), rel=1e-6)
    assert (check_rate(fenced, 3.0).verdict, check_rate(staged, 3.0).verdict) == (Verdict.WARNING, Verdict.OK)
    assert staged.shortest_step_s < fenced.shortest_step_s
    assert proposed(fenced, 1.0)["version_window"] == 4
    assert "version_window" not in proposed(staged, 1.0)
    assert proposed(replace(staged, samples_per_pack=20.0), 1.0)["version_window"] == 2


def test_what_is_advised_follows_from_the_measurement() -> None:
    assert proposed(FEEDING, None) == {"max_inflight_per_server": 20}  # 40 rollouts over two servers
    assert proposed(FEEDING, 20.0) == {"max_inflight_per_server": 20}
    wanted = proposed(FEEDING, 0.5)
    assert "version_window" not in wanted, "as written it is large enough"
    assert wanted["b_ratio"] == pytest.approx(sustained(0.25 / FEEDING.load(0.5)))
    assert proposed(FEEDING, 0.25)["version_window"] == 4  # packs of 16 steps, a version lasts 4
    outcome = check_settings(FEEDING, 0.5)
    assert outcome.verdict is Verdict.WARNING
    assert "max_inflight_per_server: " in outcome.fix
    enough = replace(FEEDING, max_inflight_per_server=64, rollouts_per_s=32.0)
    assert check_settings(enough, 4.0).verdict is Verdict.OK


def test_samples_per_pack_are_those_of_the_real_packing_in_a_long_run() -> None:
    assert samples_per_pack([50], 256) == 5.0
    assert samples_per_pack([100, 156], 256) == 2.0
    assert samples_per_pack([200], 256) == 1.0
    lengths = [40, 60, 70, 90, 110, 120, 130, 140, 150, 170, 190, 210, 240, 300, 380, 500]
    mean = sum(lengths) / len(lengths)
    assert samples_per_pack(lengths, 4096) == pytest.approx(4096 / mean, rel=0.05)
