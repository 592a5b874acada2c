"""Pacing under a virtual clock; run as a program, this file prints the table of docs/design/scheduling.md."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from pacing_setting import Outcome, Setting
from pacing_simulation import simulate

from swift_stage2.config.stage2_ab import PrefetchConfig


def constant(*durations: float) -> tuple[tuple[float, float], ...]:
    """Rollouts that always take the same time, one duration per rank."""
    return tuple((duration, duration) for duration in durations)


def slow(value: object) -> object:
    """A parameter of one more case."""
    return pytest.param(value, marks=pytest.mark.slow)


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
    outcome = run(Setting(durations=constant(6), target=8, staged=False))
    assert 45 <= outcome.ran <= 70


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


@pytest.mark.parametrize(("share", "least"), [(0.05, 0.95), (0.2, 0.75)])
@pytest.mark.parametrize("factor", [3.0, 10.0])
@pytest.mark.parametrize("sync_every_steps", [4, 8, 16])
@pytest.mark.parametrize("b_ratio", [0.1, 0.25])
def test_no_long_rollout_is_lost(
    share: float, least: float, factor: float, sync_every_steps: int, b_ratio: float
) -> None:
    """So that long ones are trained as often as they are drawn."""
    setting = replace(STREAMED, durations=((0.5, 1.5),), tail=(share, factor), num_steps=1000)
    outcome = run(replace(setting, sync_every_steps=sync_every_steps, b_ratio=b_ratio))
    assert outcome.expired == 0
    assert outcome.ran >= least * outcome.wanted


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


@pytest.mark.parametrize("sync_every_steps", [1, 4])
@pytest.mark.parametrize("b_ratio", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("bounds", [(0, 0), slow((3, 3)), slow((6, 6)), (2, 4)])
@pytest.mark.parametrize("travel_steps", [0, 1, 3])
def test_servers_that_stage_run_no_fewer_b_steps_than_drained_ones(
    travel_steps: float, bounds: tuple[float, float], b_ratio: float, sync_every_steps: int
) -> None:
    """Two ranks. The allowance is for versions that come more often: packs of a window of two age sooner."""
    drained = Setting(
        durations=(bounds,) * 2,
        travel_steps=(travel_steps,) * 2,
        b_ratio=b_ratio,
        sync_every_steps=sync_every_steps,
        target=8,
        staged=False,
    )
    staged = run(replace(drained, staged=True))
    assert staged.ran >= run(drained).ran - 0.02 * staged.wanted - 1
    assert staged.expired_share <= 0.05


@pytest.mark.parametrize(
    ("bounds", "b_ratio", "least"),
    [((0, 0), 1.0, 999), ((3, 3), 0.25, 200), ((6, 6), 0.25, 125), ((2, 4), 0.25, 211), ((2, 4), 1.0, 219)],
)
def test_a_server_that_must_be_drained_is_idle_for_one_step_a_version(
    bounds: tuple[float, float], b_ratio: float, least: int
) -> None:
    """From the step that closes it to the one that hears its proof, where weights take less than that."""
    setting = Setting(durations=(bounds,), b_ratio=b_ratio, target=8, num_steps=1000, staged=False)
    assert run(setting).ran >= 0.98 * least


@pytest.mark.parametrize("travel_steps", [0, 1, 3])
def test_a_production_that_holds_its_server_is_started_in_time(travel_steps: float) -> None:
    """Six steps are longer than packs stay fresh when nothing holds a round: a forecast that forgot it never starts."""
    setting = Setting(
        durations=constant(6), b_ratio=0.1, num_steps=1000, staged=True, travel_steps=(travel_steps,) * 2
    )
    assert run(setting).ran >= 99


# --- request by request --------------------------------------------------------------------------------

STREAMED = Setting(rollouts_per_pack=4, places=16, target=8, num_steps=300)


@pytest.mark.parametrize(
    ("duration", "window", "least"), [(0, 2, 74), (0, 1, 74), (1, 2, 74), (3, 2, 72), (3, 1, 72)]
)
def test_places_feed_what_a_batch_lane_feeds(duration: float, window: int, least: int) -> None:
    outcome = run(replace(STREAMED, durations=constant(duration), window=window))
    assert outcome.wanted == 75
    assert outcome.ran >= least
    assert outcome.expired_share <= 0.10


@pytest.mark.parametrize("sync_every_steps", [4, slow(16)])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("b_ratio", [0.25, 1.0])
def test_rollouts_of_different_length_hold_each_other_up_in_batches_only(
    b_ratio: float, staged: bool, sync_every_steps: int
) -> None:
    streamed = replace(
        STREAMED,
        durations=((0.5, 1.5),),
        b_ratio=b_ratio,
        sync_every_steps=sync_every_steps,
        staged=staged,
    )
    outcome = run(streamed)
    assert outcome.ran >= run(replace(streamed, places=0)).ran
    long_tail = replace(streamed, tail=(0.05, 10.0))
    assert run(long_tail).ran > 1.1 * run(replace(long_tail, places=0)).ran


# --- the derived target --------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("places", [0, 16])
@pytest.mark.parametrize("bounds", [(0, 0), (0.5, 1.5), slow((2, 4))])
@pytest.mark.parametrize(("b_ratio", "least_share"), [(0.25, 0.9), (1.0, 0.9)])
def test_the_derived_target_runs_what_production_allows(
    b_ratio: float, least_share: float, bounds: tuple[float, float], places: int, staged: bool
) -> None:
    prefetch = PrefetchConfig(version_window=2, sync_every_steps=4)
    ratio = Fraction(str(b_ratio))
    setting = Setting(
        durations=(bounds,),
        b_ratio=b_ratio,
        packs_per_b_step=2,
        sync_every_steps=4,
        packs_per_request=16,
        rollouts_per_pack=2 if places else 1,
        places=places,
        staged=staged,
        travel_steps=(0.5, 0.5),
        target=prefetch.target(2, ratio),
        queue_limit=prefetch.limit(2, ratio),
    )
    outcome = run(setting)
    assert outcome.ran >= run(replace(setting, target=4, queue_limit=8)).ran
    assert outcome.ran >= least_share * outcome.wanted * (1.0 if staged else 0.95)


def main() -> None:
    """Print the table of docs/design/scheduling.md."""
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
            "3 to 7 steps, b_ratio 0.1, version every 4",
            Setting(durations=((3, 7),), b_ratio=0.1, num_steps=1000, sync_every_steps=4),
        ),
        ("two ranks: no time, 3 steps", Setting(durations=constant(0, 3))),
        ("two ranks: 0 to 1, 2 to 4 steps", Setting(durations=((0, 1), (2, 4)), target=8, num_steps=1000)),
    ]
    print("| setting | B steps run | expired | versions |\n| --- | --- | --- | --- |")
    for name, setting in rows:
        outcome = run(setting)
        ran = f"{outcome.ran} of {outcome.wanted}"
        print(f"| {name} | {ran} | {outcome.expired_share:.1%} | {outcome.versions} |")
    print("\n| setting | drained: B steps run | staged: B steps run | expired | versions |")
    print("| --- | --- | --- | --- | --- |")
    for made, bounds in (
        ("no time", (0, 0)),
        ("3 steps", (3, 3)),
        ("6 steps", (6, 6)),
        ("2 to 4 steps", (2, 4)),
    ):
        for b_ratio in (0.1, 0.25, 1.0):
            print(f"| {made}, b_ratio {b_ratio:g} | {_cells_of_travel_times(bounds, b_ratio)} |")
    print("\n| setting | drained: B steps run in batches, by request | staged: the same |")
    print("| --- | --- | --- |")
    for tail in (0.0, 0.05):
        for sync_every_steps in (4, 16):
            for b_ratio in (0.1, 0.25, 1.0):
                print(_row_of_places(tail, sync_every_steps, b_ratio))


def _row_of_places(tail: float, sync_every_steps: int, b_ratio: float) -> str:
    setting = replace(
        STREAMED,
        durations=((0.5, 1.5),),
        tail=(tail, 10.0),
        sync_every_steps=sync_every_steps,
        b_ratio=b_ratio,
    )
    cells = []
    for staged in (False, True):
        streamed = replace(setting, staged=staged)
        batched = run(replace(streamed, places=0))
        cells.append(f"{batched.ran}, {run(streamed).ran} of {batched.wanted}")
    long = "one in twenty ten times as long" if tail else "0.5 to 1.5 steps"
    return f"| {long}, version every {sync_every_steps}, b_ratio {b_ratio:g} | {' | '.join(cells)} |"


def _cells_of_travel_times(bounds: tuple[float, float], b_ratio: float) -> str:
    setting = Setting(durations=(bounds,), b_ratio=b_ratio, target=8, num_steps=1000)
    drained, staged = (
        [run(replace(setting, staged=is_staged, travel_steps=(steps, steps))) for steps in (0, 1, 3)]
        for is_staged in (False, True)
    )
    ran = [" / ".join(str(outcome.ran) for outcome in outcomes) for outcomes in (drained, staged)]
    expired = " / ".join(f"{outcome.expired_share:.1%}" for outcome in staged)
    rounds = " / ".join(str(outcome.versions) for outcome in staged)
    return f"{ran[0]} of {drained[0].wanted} | {ran[1]} | {expired} | {rounds}"


if __name__ == "__main__":
    main()
