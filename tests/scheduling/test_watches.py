from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.scheduling.watches import (
    FEWEST_MISSED,
    MIN_ROLLOUTS,
    WINDOW_ROLLOUTS,
    StarvationWatch,
    TruncationGuard,
)

A = StepPlan(Channel.A)
B = StepPlan(Channel.B)
DRY = StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS)
GUARDED = StepPlan(Channel.A, SkipReason.TRUNCATION_GUARD)
SUSPECT = StepPlan(Channel.A, SkipReason.SERVERS_SUSPECT)


def verdicts(grace_steps: int, plans: list[StepPlan]) -> list[tuple[int, str]]:
    return [(step, cause) for step, cause, is_past_grace in told(grace_steps, plans) if is_past_grace]


def told(grace_steps: int, plans: list[StepPlan]) -> list[tuple[int, str, bool]]:
    watch = StarvationWatch(grace_steps)
    seen = ((step, watch.observe(plan)) for step, plan in enumerate(plans))
    return [(step, found.cause, found.is_past_grace) for step, found in seen if found is not None]


def test_a_run_without_b_is_told_once_per_grace() -> None:
    found = verdicts(8, [A, A, A, DRY] * 6)
    assert [step for step, _ in found] == [7, 15, 23]
    assert found[0][1].startswith("channel B ran at 0 of 2 wanted steps among the last 8, fewer than half")
    assert found[0][1].endswith("cause: not_enough_packs")


def test_names_the_most_frequent_cause() -> None:
    [(_, verdict)] = verdicts(5, [GUARDED, DRY, GUARDED, A, GUARDED])
    assert "0 of 4 wanted steps among the last 5" in verdict
    assert "truncation_guard" in verdict


@given(plans=st.lists(st.sampled_from([A, B, DRY, GUARDED]), max_size=80), grace=st.integers(1, 12))
def test_agrees_with_a_recount_of_the_window(plans: list[StepPlan], grace: int) -> None:
    expected, since = [], 0
    for step in range(len(plans)):
        window = plans[max(since, step + 1 - grace) : step + 1]
        ran, wanted = sum(p == B for p in window), sum(p.wanted_b for p in window)
        if len(window) == grace and 2 * ran < wanted:
            expected.append((step, ran, wanted))
            since = step + 1
    found = [(step, *map(int, re.findall(r"\d+", verdict)[:2])) for step, verdict in verdicts(grace, plans)]
    assert found == expected


@given(plans=st.lists(st.sampled_from([A, B, DRY, SUSPECT]), max_size=80))
def test_a_first_word_comes_once_in_every_silence_of_four_wanted_steps(plans: list[StepPlan]) -> None:
    expected, num_missed = [], 0
    for step, plan in enumerate(plans):
        num_missed = 0 if plan == B else num_missed + plan.wanted_b
        if num_missed == FEWEST_MISSED and plan.wanted_b:
            expected.append((step, False))
    assert [(step, is_past_grace) for step, _, is_past_grace in told(1000, plans)] == expected


def test_the_first_word_names_the_cause_long_before_the_grace_is_over() -> None:
    (word,) = told(200, [B, B, SUSPECT, DRY, SUSPECT, SUSPECT, SUSPECT])
    assert word == (
        5,
        "channel B ran at none of the last 4 steps that wanted it; most frequent cause: servers_suspect",
        False,
    )


@pytest.mark.parametrize(
    ("plans", "is_lost"),
    [
        ([], False),
        ([A, A], False),
        ([B, B], False),
        ([SUSPECT], True),  # it never ran
        ([B, SUSPECT, SUSPECT, SUSPECT], False),  # a server may be on its way back
        ([B, SUSPECT, SUSPECT, SUSPECT, SUSPECT], True),
        ([B, DRY, DRY, DRY, SUSPECT, A, A], True),
        ([B, *[SUSPECT] * 9, B], False),
        ([B, *[SUSPECT] * 9, DRY], False),  # a server is back, its packs are not yet
        ([B, *[DRY] * 9], False),
        ([DRY] * 9, False),
    ],
)
def test_b_is_lost_when_no_server_was_left_for_it_until_the_end(plans: list[StepPlan], is_lost: bool) -> None:
    watch = StarvationWatch(2)
    for plan in plans:
        watch.observe(plan)
    assert bool(watch.lost) == is_lost


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
