from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimates import compare, num_common, step_seconds


def test_steps_last_from_end_to_end_and_the_warm_up_is_left_out() -> None:
    assert step_seconds([0, 5_000_000_000, 6_000_000_000, 8_000_000_000], 1).tolist() == [1.0, 2.0]


def test_a_run_that_is_all_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="after the warm-up"):
        step_seconds([0, 1, 2], 2)


@given(st.floats(0.5, 2.0), st.integers(1, 4), st.integers(1, 30))
def test_a_constant_factor_is_found_exactly_with_no_spread(
    factor: float, num_pairs: int, num_steps: int
) -> None:
    rng = np.random.default_rng(num_pairs * 100 + num_steps)
    plain = [rng.uniform(0.1, 0.5, num_steps) for _ in range(num_pairs)]
    ratio = compare(plain, [steps * factor for steps in plain])
    for estimate in (ratio.median, ratio.total):
        assert estimate.value == pytest.approx(factor)
        assert estimate.upper_95 == pytest.approx(factor)
    assert ratio.quartiles == pytest.approx((factor, factor))
    assert (ratio.num_pairs, ratio.num_steps) == (num_pairs, num_steps)


def test_the_median_is_blind_to_one_slow_step_and_the_sum_is_not() -> None:
    plain = [np.ones(20)]
    ours = [np.ones(20)]
    ours[0][3] = 21.0
    ratio = compare(plain, ours)
    assert ratio.median.value == 1.0
    assert ratio.total.value == pytest.approx(2.0)


def test_a_pair_that_ran_slower_as_a_whole_widens_the_bound() -> None:
    """Steps of one run are alike; only resampling whole pairs shows how little two pairs tell."""
    plain = [np.ones(50), np.ones(50)]
    ratio = compare(plain, [np.ones(50), np.full(50, 1.2)])
    assert ratio.total.value == pytest.approx(1.1)
    assert ratio.total.upper_95 == pytest.approx(1.2)


def test_the_bound_covers_the_truth_as_often_as_it_says() -> None:
    """95 % upper bounds on the ratio of arms that do not differ, many times over."""
    rng = np.random.default_rng(7)
    covered = sum(
        compare([rng.gamma(50, 0.01, 60)], [rng.gamma(50, 0.01, 60)], seed=i).total.upper_95 >= 1.0
        for i in range(60)
    )
    assert covered >= 50


def test_the_longer_arm_is_cut() -> None:
    assert compare([np.ones(5)], [np.ones(9)]).num_steps == 5


def test_an_arm_without_its_partner_is_refused() -> None:
    with pytest.raises(ValueError, match="both arms"):
        compare([np.ones(5)], [])


def test_steps_count_while_all_runs_train() -> None:
    assert num_common([[1, 2, 3, 4], [2, 4, 6, 8]]) == 2
    assert num_common([[1, 2], [1, 2]]) == 2
