from __future__ import annotations

import pytest

from swift_stage2.scheduling.truncation_guard import MIN_ROLLOUTS, WINDOW_ROLLOUTS, TruncationGuard


def feed(guard: TruncationGuard, *, truncated: int, whole: int) -> None:
    for rollout in [True] * truncated + [False] * whole:
        guard.observe(rollout)


def test_pauses_above_the_limit_not_at_it() -> None:
    guard = TruncationGuard(0.25)
    feed(guard, truncated=0, whole=192)
    feed(guard, truncated=64, whole=0)
    assert guard.truncated_ratio == 0.25
    assert not guard.paused
    assert guard.observe(True)
    assert guard.paused


def test_lifts_only_below_four_fifths_of_the_limit() -> None:
    guard = TruncationGuard(0.5)
    feed(guard, truncated=WINDOW_ROLLOUTS, whole=0)
    lifted_at = []
    for _ in range(WINDOW_ROLLOUTS):
        if not guard.observe(False):
            lifted_at.append(guard.truncated_ratio)
    assert lifted_at[0] < 0.4 <= lifted_at[0] + 1 / WINDOW_ROLLOUTS


def test_sees_the_last_256_rollouts_only() -> None:
    guard = TruncationGuard(0.3)
    feed(guard, truncated=100, whole=WINDOW_ROLLOUTS)
    assert guard.truncated_ratio == 0.0
    assert not guard.paused


def test_a_few_rollouts_say_nothing_yet() -> None:
    guard = TruncationGuard(0.3)
    feed(guard, truncated=MIN_ROLLOUTS - 1, whole=0)
    assert not guard.paused
    assert guard.observe(True)


def test_the_extreme_limits() -> None:
    never, strict = TruncationGuard(1), TruncationGuard(0)
    feed(never, truncated=500, whole=0)
    assert not never.paused
    feed(strict, truncated=1, whole=WINDOW_ROLLOUTS - 1)
    assert strict.paused
    assert not strict.observe(False)


def test_refuses_a_limit_that_is_no_share() -> None:
    with pytest.raises(ValueError, match=r"got max_truncated_ratio=1\.5"):
        TruncationGuard(1.5)
