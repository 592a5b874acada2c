"""Rollouts that come one by one, against what Little's law says that a number of places can give.

A place that is always full ends a rollout per mean wait, so places give the sum of 1 / (mean wait) rollouts a step. A
round stops new ones until the longest that is out has ended, and its step begins: at most that long, and a step more,
in every ``sync_every_steps``. B runs what the schedule wants or what the places give, whichever is less; no code of
the package has a part in these numbers.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from pacing_simulation import Setting, simulate

from swift_stage2.config.stage2_ab import PrefetchConfig

NUM_STEPS = 320
ROLLOUTS_PER_B_STEP = 16  # four packs of four
SPREAD = (0.5, 1.5)  # of a wait, around its mean
TAIL_SHARE, TAIL_FACTOR = 0.05, 10.0
SLOW_FACTOR = 2


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("wait", "num_slow", "is_long_tailed", "b_ratio", "sync_every_steps"),
    [
        # The schedule binds.
        pytest.param(0.5, 0, False, 1.0, 16, marks=pytest.mark.slow),
        pytest.param(0.5, 8, False, 1.0, 16, marks=pytest.mark.slow),
        pytest.param(2.0, 0, False, 0.25, 16, marks=pytest.mark.slow),
        pytest.param(0.5, 0, True, 0.5, 64, marks=pytest.mark.slow),
        (1.0, 8, True, 0.25, 64),
        # The places bind.
        pytest.param(1.5, 0, False, 1.0, 16, marks=pytest.mark.slow),
        (1.5, 8, False, 1.0, 64),
        pytest.param(3.0, 0, False, 1.0, 64, marks=pytest.mark.slow),
        pytest.param(1.0, 0, True, 1.0, 64, marks=pytest.mark.slow),
        (1.0, 8, True, 1.0, 64),
    ],
)
def test_b_runs_what_the_places_give(
    wait: float, num_slow: int, is_long_tailed: bool, b_ratio: float, sync_every_steps: int, staged: bool
) -> None:
    """16 places; a rollout waits ``wait`` steps in the mean, on a slow server twice as long."""
    mean = wait * (1 + TAIL_SHARE * (TAIL_FACTOR - 1) if is_long_tailed else 1)
    longest = wait * SPREAD[1] * (TAIL_FACTOR if is_long_tailed else 1) * (SLOW_FACTOR if num_slow else 1)
    num_places = 16
    rollouts_per_step = (num_places - num_slow) / mean + num_slow / (SLOW_FACTOR * mean)
    given = rollouts_per_step / ROLLOUTS_PER_B_STEP
    between_rounds = max(0.0, 1 - (longest + 1) / sync_every_steps)

    prefetch = PrefetchConfig(sync_every_steps=sync_every_steps)
    ratio = Fraction(str(b_ratio))
    outcome = simulate(
        Setting(
            durations=((wait * SPREAD[0], wait * SPREAD[1]),),
            tail=(TAIL_SHARE, TAIL_FACTOR) if is_long_tailed else (0.0, 1.0),
            places=num_places,
            slow_places=num_slow,
            rollouts_per_pack=4,
            b_ratio=b_ratio,
            sync_every_steps=sync_every_steps,
            staged=staged,
            round_steps=(0.3, 0.3) if staged else None,
            target=prefetch.target(4, ratio),
            queue_limit=prefetch.limit(4, ratio),
            num_steps=NUM_STEPS,
        )
    )
    assert outcome.stale_trained == 0
    start = longest + 2  # the first packs come so late at the latest
    assert outcome.ran >= min(b_ratio, given * between_rounds) * (NUM_STEPS - start) - 1
    assert outcome.ran <= min(b_ratio, given * 1.05) * NUM_STEPS  # drawn waits may be a little shorter
    assert outcome.expired_share <= 0.05
