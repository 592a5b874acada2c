from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.scheduling.watches import (
    MIN_ROLLOUTS,
    WINDOW_ROLLOUTS,
    StarvationWatch,
    TruncationGuard,
)

A = StepPlan(Channel.A)
B = StepPlan(Channel.B)
DRY = StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS)
GUARDED = StepPlan(Channel.A, SkipReason.TRUNCATION_GUARD)


def verdicts(grace_steps: int, plans: list[StepPlan]) -> list[tuple[int, str]]:
    watch = StarvationWatch(grace_steps)
    seen = ((step, watch.observe(plan)) for step, plan in enumerate(plans))
    return [(step, verdict) for step, verdict in seen if verdict is not None]


def test_a_run_without_b_is_told_once_per_grace() -> None:
    told = verdicts(8, [A, A, A, DRY] * 6)
    assert [step for step, _ in told] == [7, 15, 23]
    assert told[0][1].startswith("channel B ran at 0 of 2 wanted steps among the last 8, fewer than half")
    assert told[0][1].endswith("cause: not_enough_packs")


def test_half_is_enough_and_less_is_not() -> None:
    assert verdicts(4, [B, DRY, B, DRY]) == []
    assert [step for step, _ in verdicts(6, [B, DRY, B, DRY, A, DRY])] == [5]


def test_names_the_most_frequent_cause() -> None:
    [(_, verdict)] = verdicts(5, [GUARDED, DRY, GUARDED, A, GUARDED])
    assert "0 of 4 wanted steps among the last 5" in verdict
    assert "truncation_guard" in verdict


def test_starvation_after_a_long_healthy_run_shows_within_one_grace() -> None:
    told = verdicts(20, [A, B] * 5000 + [A, DRY] * 10)
    assert told
    assert told[0][0] < 10_000 + 20


def test_a_schedule_that_wants_no_b_does_not_starve() -> None:
    assert verdicts(3, [A] * 50) == []


@given(plans=st.lists(st.sampled_from([A, B, DRY, GUARDED]), max_size=80), grace=st.integers(1, 12))
def test_agrees_with_a_recount_of_the_window(plans: list[StepPlan], grace: int) -> None:
    expected, since = [], 0
    for step in range(len(plans)):
        window = plans[max(since, step + 1 - grace) : step + 1]
        ran, wanted = sum(p == B for p in window), sum(p.wanted_b for p in window)
        if len(window) == grace and 2 * ran < wanted:
            expected.append((step, ran, wanted))
            since = step + 1
    told = [(step, *map(int, re.findall(r"\d+", verdict)[:2])) for step, verdict in verdicts(grace, plans)]
    assert told == expected


def test_refuses_a_grace_of_no_steps() -> None:
    with pytest.raises(ValueError, match="got grace_steps=0"):
        StarvationWatch(0)


def feed(guard: TruncationGuard, *, truncated: int, whole: int) -> None:
    for rollout in [True] * truncated + [False] * whole:
        guard.observe(rollout)


def test_pauses_above_the_limit_not_at_it() -> None:
    guard = TruncationGuard(0.25)
    feed(guard, truncated=0, whole=192)
    feed(guard, truncated=64, whole=0)
    assert guard.truncated_ratio == 0.25
    assert not guard.paused
    guard.observe(True)
    assert guard.paused


def test_lifts_only_below_four_fifths_of_the_limit() -> None:
    guard = TruncationGuard(0.5)
    feed(guard, truncated=WINDOW_ROLLOUTS, whole=0)
    lifted_at = []
    for _ in range(WINDOW_ROLLOUTS):
        guard.observe(False)
        if not guard.paused:
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
    guard.observe(True)
    assert guard.paused


def test_the_extreme_limits() -> None:
    never, strict = TruncationGuard(1), TruncationGuard(0)
    feed(never, truncated=500, whole=0)
    assert not never.paused
    feed(strict, truncated=1, whole=WINDOW_ROLLOUTS - 1)
    assert strict.paused
    strict.observe(False)
    assert not strict.paused


def test_refuses_a_limit_that_is_no_share() -> None:
    with pytest.raises(ValueError, match=r"got max_truncated_ratio=1\.5"):
        TruncationGuard(1.5)
