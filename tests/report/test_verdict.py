"""The verdict: exact on runs whose times are known, and within its bounds on any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swift_stage2.report.content import Headline, Sentence
from swift_stage2.report.verdict import (
    FEWEST_QUIET,
    WORKING,
    RankWork,
    Speed,
    TrainedStep,
    bottlenecks,
    measure,
    paces_of,
    slowest,
    sustained_b_ratio,
    verdict_section,
)
from swift_stage2.telemetry.summary import RunSummary, summary_of

B_RATIO = 0.5


def step(channel: str, seconds: float, is_quiet: bool = True, number: int = 0) -> TrainedStep:
    return TrainedStep(number, channel, seconds, is_quiet)


def work(
    steps: list[TrainedStep],
    *,
    syncing_s: float = 0.0,
    pipeline_s: Mapping[str, float] | None = None,
    packs: tuple[int, int] = (1, 1),
    rank: int = 0,
) -> RankWork:
    """``packs``: made, trained."""
    return RankWork(
        rank=rank,
        steps=steps,
        syncing_s=syncing_s,
        pipeline_s=pipeline_s or {},
        packs_made=packs[0],
        packs_trained=packs[1],
    )


def summary(
    num_steps: int = 20, num_b_run: int = 10, num_rounds: int = 5, num_stale: int = 0, **others: Any
) -> RunSummary:
    """All that advice reads of a run; nothing was skipped or failed, unless ``others`` say so."""
    nothing = summary_of([])
    values = {
        "num_steps": num_steps,
        "num_b_wanted": num_b_run,
        "num_b_run": num_b_run,
        "num_rounds_committed": num_rounds,
        "totals": {**nothing.totals, "packs_dropped_stale": num_stale},
    }
    return replace(nothing, **(values | others))


def told_of(speed: Speed | None, told: RunSummary, b_ratio: float | None = B_RATIO) -> list[str]:
    return list(bottlenecks(speed, told, b_ratio))


def speed_of(work_: RankWork) -> Speed:
    found = measure(work_)
    assert isinstance(found, Speed)
    return found


TEN_AND_TEN = [step("A", 0.2)] * 10 + [step("B", 0.4)] * 10


def test_a_run_that_hides_all_its_rollouts_reaches_its_bound() -> None:
    speed = speed_of(
        work(TEN_AND_TEN, syncing_s=1.0, pipeline_s={"asking": 4.0, "packing": 1.0, "idle": 2.0})
    )
    assert speed.steps_s == pytest.approx(6.0)
    assert (speed.learner_s, speed.rollouts_s) == pytest.approx((7.0, 5.0))
    assert (speed.inline_s, speed.ideal_s, speed.wall_s) == pytest.approx((12.0, 7.0, 7.0))
    assert (speed.speed_up, speed.bound, speed.fraction) == pytest.approx((12 / 7, 12 / 7, 1.0))


def test_work_for_packs_that_were_never_trained_is_none_that_inline_would_do() -> None:
    speed = speed_of(work(TEN_AND_TEN, pipeline_s={"asking": 4.0}, packs=(20, 10)))
    assert speed.rollouts_s == pytest.approx(2.0)


def test_waiting_of_the_pipeline_is_no_work() -> None:
    idle = {"idle": 9.0, "ticket": 9.0, "evaluating": 9.0, "asking": 1.0}
    assert speed_of(work(TEN_AND_TEN, pipeline_s=idle)).rollouts_s == pytest.approx(1.0)


def test_slow_steps_beside_rollouts_cost_the_fraction() -> None:
    steps = [step("B", 0.2)] * 10 + [step("B", 0.3, is_quiet=False)] * 10
    speed = speed_of(work(steps, pipeline_s={"asking": 1.0}))
    assert speed.steps_s == pytest.approx(4.0)
    assert speed.fraction == pytest.approx(4 / 5)
    (pace,) = speed.paces
    assert pace.slowdown == pytest.approx(0.5)


def test_few_quiet_steps_make_an_estimate_that_says_so() -> None:
    steps = [step("B", 0.1)] * (FEWEST_QUIET - 1) + [
        step("B", 1.0 + n / 10, is_quiet=False) for n in range(17)
    ]
    (pace,) = paces_of(steps)
    assert pace.is_estimate
    assert pace.slowdown is None
    assert pace.quiet_s == pytest.approx(1.1)  # the sixth of 21


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        (work([]), "no step was timed"),
        (work([step("A", 0.2)], pipeline_s={"asking": 1.0}, packs=(4, 4)), "no step on channel B was timed"),
        (work([step("B", 0.2)]), "no pack was made"),
        (work([step("B", 0.2)], pipeline_s={"asking": 1.0}, packs=(0, 0)), "no pack was made"),
    ],
)
def test_what_is_missing_is_told_instead_of_a_number(lacking: RankWork, told: str) -> None:
    found = slowest([lacking])
    assert isinstance(found, str)
    assert told in found


def test_the_slowest_rank_speaks_for_the_run() -> None:
    fast = work(TEN_AND_TEN, pipeline_s={"asking": 1.0}, rank=0)
    slow = work(TEN_AND_TEN, pipeline_s={"asking": 1.0}, rank=1, syncing_s=3.0)
    found = slowest([fast, slow])
    assert isinstance(found, Speed)
    assert found.rank == 1


seconds = st.floats(1e-2, 10)
works = st.builds(
    work,
    st.lists(st.builds(step, st.sampled_from("AB"), seconds, st.booleans()), min_size=2, max_size=40),
    syncing_s=st.floats(0, 100),
    pipeline_s=st.fixed_dictionaries({name: st.floats(0, 300) for name in (*WORKING, "idle")}),
    packs=st.tuples(st.integers(1, 50), st.integers(1, 50)).map(lambda two: (max(two), min(two))),
)


@given(works)
def test_the_numbers_of_any_run_fit_each_other(work_: RankWork) -> None:
    speed = measure(work_)
    assume(isinstance(speed, Speed))
    assert isinstance(speed, Speed)
    assert speed.fraction == pytest.approx(speed.speed_up / speed.bound)
    assert 1 <= speed.bound <= 2 + 1e-9  # two actors side by side
    assert speed.inline_s == pytest.approx(speed.steps_s + speed.rounds_s + speed.rollouts_s)
    assert speed.learner_binds == (speed.ideal_s > speed.rollouts_s)
    assert speed.wall_s == pytest.approx(sum(one.seconds for one in work_.steps) + work_.syncing_s)


@given(works, st.integers(1, 40))
def test_the_ratio_proposed_is_one_that_the_rollouts_feed(work_: RankWork, num_b_run: int) -> None:
    speed = measure(work_)
    assume(isinstance(speed, Speed) and speed.rollouts_s > 1e-6)
    assert isinstance(speed, Speed)
    ratio = sustained_b_ratio(speed, summary(num_steps=40, num_b_run=num_b_run))
    assert 0 <= ratio <= 1
    assert ratio / (num_b_run / 40) * speed.rollouts_s <= speed.learner_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("pipeline_s", "binds", "advice"),
    [
        ({"asking": 3.0}, "The learner binds", "up to 1: 10 of 20 steps × 6 s / 3 s."),
        ({"asking": 8.0, "preparing": 1.0}, "The rollouts bind", "0.33: 10 of 20 steps × 6 s / 9 s."),
        (
            {"asking": 2.0, "preparing": 7.0},
            "Preparation on the CPU binds",
            "0.33: 10 of 20 steps × 6 s / 9 s.",
        ),
    ],
)
def test_what_binds_is_named_with_the_ratio_that_it_sustains(
    pipeline_s: dict[str, float], binds: str, advice: str
) -> None:
    first, *_ = told_of(speed_of(work(TEN_AND_TEN, pipeline_s=pipeline_s)), summary())
    assert first.startswith(binds)
    assert first.endswith(f" The rollouts sustain stage2_ab.schedule.b_ratio {advice}")


def test_every_other_loss_is_told_by_itself() -> None:
    steps = TEN_AND_TEN + [step("A", 0.25, is_quiet=False)] * 10
    speed = speed_of(work(steps, syncing_s=2.0, pipeline_s={"asking": 1.0}))
    told = summary(
        num_steps=30,
        num_b_wanted=30,
        skips={"not_enough_packs": 4, "servers_suspect": 1},
        num_stale=7,
    )
    found = told_of(speed, told)
    parts = ["learner binds", "rounds take", "slower beside", "went stale", "no proven server was left"]
    assert [part in sentence for part, sentence in zip(parts, found, strict=True)] == [True] * len(parts)


def test_a_run_that_lost_its_servers_is_told_that_and_to_turn_no_knob() -> None:
    """Its slower steps are those that had a server at all."""
    steps = TEN_AND_TEN + [step("A", 0.25, is_quiet=False)] * 10
    speed = speed_of(work(steps, pipeline_s={"asking": 1.0}))
    skips = {"not_enough_packs": 4, "servers_suspect": 2}
    told = summary(num_steps=30, num_b_wanted=30, skips=skips)
    (no_server,) = told_of(speed, told)
    assert "2 wanted B steps did not run: no proven server was left" in no_server


@pytest.mark.parametrize(
    ("skips", "names"),
    [
        (
            {"not_enough_packs": 4},
            ["packing_length", "max_inflight_per_server", "b_ratio", "Queue and version lag"],
        ),
        ({"truncation_guard": 4}, ["rollout.decoding.max_new_tokens"]),
        ({"servers_suspect": 4}, ["Sync rounds"]),
    ],
)
def test_steps_that_were_skipped_come_with_a_setting_or_a_section(
    skips: dict[str, int], names: list[str]
) -> None:
    """Two of six: what trained was hidden whole, and yet the run did not do what was wanted."""
    speed = measure(work(TEN_AND_TEN, pipeline_s={"asking": 1.0}))
    told = summary(num_b_run=2, num_b_wanted=6, skips=skips)
    section = verdict_section(speed, told, B_RATIO)
    sentences = " ".join(part.text for part in section.parts if isinstance(part, Sentence))
    assert all(name in sentences for name in names)
    assert "the 4 of 6 wanted B steps that did not run count in neither" in sentences
    headline = next(part for part in section.parts if isinstance(part, Headline))
    assert ("reached", "100%", "of the bound for the 2 B steps that ran") in headline.numbers


def test_more_than_the_bound_is_told_as_the_bound() -> None:
    steps = [step("A", 1.0)] * 6 + [step("A", 0.5)] * 5 + [step("B", 1.0)] * 6 + [step("B", 0.5)] * 5
    section = verdict_section(measure(work(steps, pipeline_s={"asking": 1.0})), summary(), B_RATIO)
    headline = next(part for part in section.parts if isinstance(part, Headline))
    assert ("reached", "100%", "of the bound") in headline.numbers
