"""What a trend finds in series whose slope is known, against the slope by its definition."""

from __future__ import annotations

import random
import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimates import FEWEST_STEPS, NUM_STEPS, Tolerance, Trend, Verdict, trend

STEPS = range(0, 2000, 10)
MEMORY = Tolerance(share=0.02)


def found(values: list[float], tolerance: Tolerance = MEMORY, steps: range = STEPS) -> Trend:
    result = trend(steps, values, tolerance)
    assert result is not None
    return result


def noisy(per_step: float, *, noise: float, seed: int = 0, start: float = 1000.0) -> list[float]:
    rng = random.Random(seed)
    return [start + per_step * step + rng.gauss(0, noise) for step in STEPS]


@given(st.lists(st.integers(-1000, 1000), min_size=20, max_size=60))
def test_the_drift_is_the_median_of_all_slopes_behind_the_warm_up(values: list[int]) -> None:
    steps = range(0, 7 * len(values), 7)
    kept = [(x, y) for x, y in zip(steps, values, strict=True) if x >= steps[-1] / 5]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(kept, 2)]
    result = found([float(value) for value in values], Tolerance(amount=1), steps)
    assert result.drift == pytest.approx(statistics.median(slopes) * NUM_STEPS)
    assert result.low <= result.drift + 1e-6
    assert result.drift <= result.high + 1e-6
    assert result.median == statistics.median(y for _, y in kept)
    assert result.num_values == len(kept)


@pytest.mark.parametrize("seed", range(20))
def test_a_series_that_rises_above_its_tolerance_is_found_rising(seed: int) -> None:
    rising = found(noisy(0.02, noise=5.0, seed=seed))  # 40 in 2,000 steps, of 20 that are tolerated
    assert rising.verdict is Verdict.RISING
    assert rising.low <= 40 * 1.1
    assert rising.high >= 40 * 0.9


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_series_without_a_slope_is_flat(seed: int) -> None:
    assert found(noisy(0.0, noise=5.0, seed=seed)).verdict is Verdict.FLAT


def test_one_that_falls_is_flat() -> None:
    assert found(noisy(-0.1, noise=5.0)).verdict is Verdict.FLAT


def test_noise_that_hides_the_tolerance_is_not_called_flat() -> None:
    assert found(noisy(0.0, noise=200.0)).verdict is Verdict.UNCLEAR


def test_what_happens_in_the_warm_up_does_not_count() -> None:
    warming = [min(1.0, step / 400) * 1000.0 for step in STEPS]
    assert found(warming).verdict is Verdict.FLAT
    assert found(warming).drift == 0


def test_disturbed_samples_do_not_hide_a_rise_nor_make_one() -> None:
    flat, rising = noisy(0.0, noise=1.0), noisy(0.02, noise=1.0)
    for number in range(3, len(STEPS), 7):
        flat[number] += 500.0
        rising[number] -= 500.0
    assert found(flat).verdict is Verdict.FLAT
    assert found(rising).verdict is Verdict.RISING


def test_one_thread_more_is_tolerated_and_a_leak_is_not() -> None:
    one_more = [30.0 + (step >= 1000) for step in STEPS]
    leak = [30.0 + step // 400 for step in STEPS]
    assert found(one_more, Tolerance(amount=1)).verdict is not Verdict.RISING
    assert found(leak, Tolerance(amount=1)).verdict is Verdict.RISING


def test_a_short_run_proves_nothing() -> None:
    steps = range(0, FEWEST_STEPS, 10)
    assert found([float(step) for step in steps], steps=steps).verdict is Verdict.TOO_SHORT


@pytest.mark.parametrize("count", [0, 1, 11])
def test_too_few_values_have_no_trend(count: int) -> None:
    assert trend(range(count), [1.0] * count, Tolerance(amount=1)) is None
