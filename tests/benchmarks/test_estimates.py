"""Repeated measurements give ratios of pairs, their bounds, spreads, and trends whose slope is known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimates import (
    Trend,
    gain_words,
    paired_ratio,
    ratio_of_medians,
    step_seconds,
    trend,
)
from benchmarks.results import in_turns


def test_gains_of_few_seeds_have_a_range_and_of_more_students_interval() -> None:
    assert gain_words([0.01, 0.03], ".2f") == "0.02 (0.01..0.03)"
    # Mean 2, standard error 1 / sqrt(3), and 4.303 of them to either side at two degrees of freedom (any table of t).
    assert gain_words([1.0, 2.0, 3.0], ".2f") == "2.00 (1.00..3.00), 95 %: -0.48..4.48"


def test_steps_last_from_end_to_end_and_the_warm_up_is_left_out() -> None:
    assert step_seconds([0, 5_000_000_000, 6_000_000_000, 8_000_000_000], 1).tolist() == [1.0, 2.0]


@given(st.floats(0.5, 2.0), st.integers(1, 3), st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_a_constant_factor_is_found_exactly_with_no_spread(
    factor: float, num_pairs: int, num_steps: int
) -> None:
    rng = np.random.default_rng(num_pairs * 100 + num_steps)
    plain = [rng.uniform(0.1, 0.5, num_steps) for _ in range(num_pairs)]
    ratio = paired_ratio(plain, [np.append(steps, 7.0) * factor for steps in plain])  # the longer arm is cut
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((factor,) * 3)


def test_a_pair_that_ran_slower_as_a_whole_widens_the_bound() -> None:
    """Steps of one run are alike; only resampling whole pairs shows how little two pairs tell."""
    ratio = paired_ratio([np.ones(50), np.ones(50)], [np.ones(50), np.full(50, 1.2)])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.0, 1.1, 1.2))


def test_a_ratio_of_medians_covers_the_truth_as_often_as_it_says() -> None:
    """95 % intervals of samples whose medians are in the ratio 1.5, many times over."""
    rng = np.random.default_rng(3)
    found = [
        ratio_of_medians((1.5 * rng.gamma(50, 0.01, 60)).tolist(), rng.gamma(50, 0.01, 60).tolist())
        for _ in range(60)
    ]
    assert sum(ratio.low <= 1.5 <= ratio.high for ratio in found) >= 50
    assert all(ratio.low <= ratio.value <= ratio.high for ratio in found)


# --- trends ------------------------------------------------------------------------------------------


STEPS = range(0, 2000, 10)


def found(values: list[float], steps: range = STEPS, **tolerance: float) -> Trend:
    result = trend(steps, values, **(tolerance or {"share": 0.02}))
    assert result is not None
    return result


def noisy(per_step: float, *, noise: float, seed: int = 0, start: float = 1000.0) -> list[float]:
    rng = random.Random(seed)
    return [start + per_step * step + rng.gauss(0, noise) for step in STEPS]


@pytest.mark.parametrize("seed", range(20))
def test_a_series_that_rises_above_its_tolerance_is_found_rising(seed: int) -> None:
    rising = found(noisy(0.02, noise=5.0, seed=seed))  # 40 in 2,000 steps, of 20 that are tolerated
    assert rising.verdict == "rising"
    assert rising.low <= 40 * 1.1
    assert rising.high >= 40 * 0.9


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_series_without_a_slope_is_flat(seed: int) -> None:
    assert found(noisy(0.0, noise=5.0, seed=seed)).verdict == "flat"


def test_every_arm_has_its_turn_in_each_repetition_and_who_goes_first_alternates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = list(in_turns(("a", "b", "c"), 3))
    assert [arm for _, arm in turns] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [number for number, _ in turns] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert "[bench] repetition 2 of 3: c" in capsys.readouterr().out
