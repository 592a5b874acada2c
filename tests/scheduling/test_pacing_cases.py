"""Pacing under a virtual clock; run as a program, this file prints the table of docs/design/pacing.md."""

from __future__ import annotations

import pytest
from pacing_simulation import Outcome, Setting, simulate

from swift_stage2.scheduling.pacing import PacingReason


def constant(*durations: float) -> tuple[tuple[float, float], ...]:
    """Rollouts that always take the same time, one duration per rank."""
    return tuple((duration, duration) for duration in durations)


def run(setting: Setting) -> Outcome:
    """Simulate and check what must hold in any setting: every step runs, and no stale pack is trained."""
    outcome = simulate(setting)
    assert outcome.steps == setting.num_steps, "a step waited"
    assert outcome.stale_trained == 0
    return outcome


@pytest.mark.parametrize("window", [2, 1])
def test_rollouts_that_take_no_time(window: int) -> None:
    outcome = run(Setting(durations=constant(0), window=window, target=4))
    assert outcome.wanted == 100
    assert outcome.ran >= 98
    assert outcome.expired_share <= 0.10


@pytest.mark.parametrize("target", [4, 8])
def test_rollouts_of_three_steps(target: int) -> None:
    outcome = run(Setting(durations=constant(3), target=target))
    assert outcome.ran >= 95


def test_rollouts_of_six_steps_and_production_binds() -> None:
    outcome = run(Setting(durations=constant(6), target=8))
    assert 45 <= outcome.ran <= 70
    assert PacingReason.PRODUCTION_BINDS in outcome.reasons
    assert outcome.load == pytest.approx(1.0 / (4 / 7))


def test_rollouts_that_keep_up_are_not_said_to_bind() -> None:
    outcome = run(Setting(durations=constant(2)))
    assert PacingReason.PRODUCTION_BINDS not in outcome.reasons
    assert outcome.load < 1


@pytest.mark.parametrize("tie_ends_first", [False, True])
@pytest.mark.parametrize("duration", [1, 2, 3])
def test_whole_durations_whichever_side_of_a_step_start_they_end(duration: int, tie_ends_first: bool) -> None:
    delay = 0.0 if tie_ends_first else 1 / 64
    outcome = run(Setting(durations=constant(duration), pipeline_delay=delay))
    assert outcome.ran >= 95


@pytest.mark.parametrize("duration", range(11))
def test_single_packs_with_rare_rounds(duration: int) -> None:
    """b_ratio 0.3, no accumulation, a round every four steps: production keeps up at every duration here."""
    outcome = run(
        Setting(
            durations=constant(duration),
            b_ratio=0.3,
            packs_per_b_step=1,
            sync_every_steps=4,
            window=2,
            target=8,
        )
    )
    assert outcome.ran >= outcome.wanted - 3, outcome
    # The first request is made before anything is measured; the second may follow in the same stretch.
    assert outcome.expired <= 16 if duration == 0 else outcome.expired_share <= 0.12, outcome


@pytest.mark.parametrize("duration", range(10))
def test_rare_b_steps_hit_their_moment(duration: int) -> None:
    """A round at every step leaves each B step two possible starts; all durations under the cycle must find them."""
    outcome = run(Setting(durations=constant(duration), b_ratio=0.1, num_steps=1000))
    assert outcome.ran >= 97
    assert outcome.expired_share <= 0.02


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("b_ratio", "fastest"), [(0.1, 2), (0.2, 2), (0.25, 1), (0.25, 2)])
def test_jitter_within_the_window(b_ratio: float, fastest: int, seed: int) -> None:
    """Durations that differ by up to two steps: what (window - 1) × sync_every_steps plus a step's start forgives."""
    outcome = run(
        Setting(durations=((fastest, fastest + 2),), b_ratio=b_ratio, seed=seed, num_steps=1000, target=4)
    )
    assert outcome.ran >= 0.95 * outcome.wanted
    assert outcome.expired_share <= 0.05


@pytest.mark.parametrize("seed", range(3))
def test_wide_jitter_with_the_default_cadence(seed: int) -> None:
    outcome = run(
        Setting(durations=((0, 7),), b_ratio=0.1, sync_every_steps=4, seed=seed, num_steps=1000, target=4)
    )
    assert outcome.ran >= 0.97 * outcome.wanted
    assert outcome.expired_share <= 0.10


@pytest.mark.parametrize("sync_every_steps", [1, 4])
@pytest.mark.parametrize("b_ratio", [0.1, 0.25])
@pytest.mark.parametrize("window", [1, 2])
def test_a_fast_rank_beside_a_slow_one(window: int, b_ratio: float, sync_every_steps: int) -> None:
    """The slow rank's POSTs keep the fence closed for both: the fast one must start together with it."""
    outcome = run(
        Setting(
            durations=constant(0, 3),
            b_ratio=b_ratio,
            window=window,
            sync_every_steps=sync_every_steps,
            num_steps=1000,
        )
    )
    assert outcome.ran >= outcome.wanted - 3
    assert outcome.expired_share <= 0.05


@pytest.mark.parametrize("seed", range(3))
def test_three_ranks_with_jitter(seed: int) -> None:
    outcome = run(Setting(durations=((0, 1), (1, 2), (2, 3)), seed=seed, num_steps=1000))
    assert outcome.ran >= 0.97 * outcome.wanted


@pytest.mark.parametrize(("window", "sync_every_steps"), [(1, 1), (2, 1), (2, 4)])
def test_b_resumes_after_an_outage(window: int, sync_every_steps: int) -> None:
    """200 of 1,000 steps without a server cost their own B steps and at most two more."""
    outcome = run(
        Setting(
            durations=constant(2),
            window=window,
            sync_every_steps=sync_every_steps,
            num_steps=1000,
            outage=(200, 400),
        )
    )
    assert outcome.ran >= 250 - 50 - 2


@pytest.mark.parametrize("duration", [4, 5, 6, 8])
def test_production_that_binds_never_idles(duration: int) -> None:
    """One request per cycle of rollout and round is all a serial server can give; nearly all of it is trained."""
    outcome = run(Setting(durations=constant(duration), target=8))
    assert outcome.ran >= 400 // (duration + 1) - 1
    assert outcome.expired_share <= 0.05


def test_every_step_on_b_with_instant_rollouts() -> None:
    outcome = run(Setting(b_ratio=1.0, sync_every_steps=4))
    assert outcome.ran >= outcome.wanted - 1


def main() -> None:
    """Print the table of docs/design/pacing.md."""
    rows = [
        ("no time, window 2, target 4", Setting()),
        ("no time, window 1, target 4", Setting(window=1)),
        ("3 steps, window 2, target 4", Setting(durations=constant(3))),
        ("3 steps, window 2, target 8", Setting(durations=constant(3), target=8)),
        ("6 steps, window 2, target 4", Setting(durations=constant(6))),
        ("6 steps, window 2, target 8", Setting(durations=constant(6), target=8)),
        ("2 to 4 steps, b_ratio 0.1", Setting(durations=((2, 4),), b_ratio=0.1, num_steps=1000)),
        ("3 to 7 steps, b_ratio 0.1", Setting(durations=((3, 7),), b_ratio=0.1, num_steps=1000)),
        (
            "3 to 7 steps, b_ratio 0.1, round every 4",
            Setting(durations=((3, 7),), b_ratio=0.1, num_steps=1000, sync_every_steps=4),
        ),
        ("two ranks: no time, 3 steps", Setting(durations=constant(0, 3))),
        ("two ranks: 0 to 1, 2 to 4 steps", Setting(durations=((0, 1), (2, 4)), target=8, num_steps=1000)),
    ]
    print("| setting | B steps run | expired | rounds |\n| --- | --- | --- | --- |")
    for name, setting in rows:
        outcome = run(setting)
        ran = f"{outcome.ran} of {outcome.wanted}"
        print(f"| {name} | {ran} | {outcome.expired_share:.1%} | {outcome.rounds} |")


if __name__ == "__main__":
    main()
