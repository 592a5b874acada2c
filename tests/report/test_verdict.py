"""The verdict: exact on runs whose times are known, and within its bounds on any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.report.content import Sentence, Table
from swift_stage2.report.verdict import (
    FEWEST_QUIET,
    WORKING,
    Speed,
    TrainedStep,
    bottlenecks,
    slowest,
    speed_of,
    sustained_b_ratio,
    verdict_section,
)
from swift_stage2.telemetry.event_log import RankEvents
from swift_stage2.telemetry.events import Metrics
from swift_stage2.telemetry.summary import RunSummary, summary_of


def step(channel: str, seconds: float, is_quiet: bool = True, number: int = 0) -> TrainedStep:
    return TrainedStep(number, channel, seconds, is_quiet)


def work(
    steps: list[TrainedStep],
    *,
    syncing_s: float = 0.0,
    pipeline_s: Mapping[str, float] | None = None,
    rank: int = 0,
) -> Speed:
    working_s = {name: pipeline_s.get(name, 0.0) for name in WORKING} if pipeline_s else {}
    return Speed(rank=rank, steps=steps, rounds_s=syncing_s, working_s=working_s)


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


def told_of(speed: Speed | None, told: RunSummary) -> list[str]:
    return list(bottlenecks(speed, told))


TEN_AND_TEN = [step("A", 0.2)] * 10 + [step("B", 0.4)] * 10


def test_a_run_that_hides_all_its_rollouts_reaches_its_bound() -> None:
    speed = work(TEN_AND_TEN, syncing_s=1.0, pipeline_s={"asking": 4.0, "packing": 1.0, "idle": 2.0})
    assert speed.steps_s == pytest.approx(6.0)
    assert (speed.learner_s, speed.rollouts_s) == pytest.approx((7.0, 5.0))
    assert speed.wall_s == pytest.approx(7.0)
    numbers = [speed.facts[name] for name in ("inline_s", "ideal_s", "speed_up", "bound", "fraction")]
    assert numbers == pytest.approx([12.0, 7.0, 12 / 7, 12 / 7, 1.0])


def test_phases_count_as_time_and_are_compared_with_two_halves_of_the_devices() -> None:
    speed = work(TEN_AND_TEN, syncing_s=1.0, pipeline_s={"asking": 4.0})
    speed = replace(speed, filling_s=4.5, switching_s=0.5)
    assert speed.wall_s == pytest.approx(12.0)
    told, *_ = told_of(speed, summary())
    assert "making packs takes 4.5 s of 12 s, switching 500 ms (4%)" in told, told
    assert "about 13 s" in told, "2 x 6 + 1 of the learner, 2 x 4 of the servers"


def test_of_the_pipelines_time_counts_its_work_for_the_packs_that_were_trained() -> None:
    last = Metrics(
        step=None,
        numbers={"packs_made": 20, "packs_trained": 10},
        activity_ns={},
        pipeline_ns={"asking": 4 * 10**9, "packing": 10**9, "idle": 9 * 10**9, "ticket": 9 * 10**9},
    )
    assert speed_of(RankEvents(0, [[last]])).rollouts_s == pytest.approx(2.5)


def test_slow_steps_beside_rollouts_cost_the_fraction() -> None:
    steps = [step("B", 0.2)] * 10 + [step("B", 0.3, is_quiet=False)] * 10
    speed = work(steps, pipeline_s={"asking": 1.0})
    assert speed.steps_s == pytest.approx(4.0)
    assert speed.facts["fraction"] == pytest.approx(4 / 5)
    (pace,) = speed.paces
    assert pace.slowdown == pytest.approx(0.5)


def test_few_quiet_steps_make_an_estimate_that_says_so() -> None:
    steps = [step("B", 0.1)] * (FEWEST_QUIET - 1) + [
        step("B", 1.0 + n / 10, is_quiet=False) for n in range(17)
    ]
    (pace,) = work(steps).paces
    assert pace.is_estimate
    assert pace.slowdown is None
    assert pace.quiet_s == pytest.approx(1.1)  # the sixth of 21


@pytest.mark.parametrize(
    ("speed", "told"),
    [
        (work([]), "no step was timed"),
        (work([step("A", 0.2)], pipeline_s={"asking": 1.0}), "no step on channel B was timed"),
        (work([step("B", 0.2)]), "no pack was made"),
    ],
)
def test_what_is_missing_is_told_instead_of_a_number(speed: Speed, told: str) -> None:
    assert told in speed.lacks
    whole = work(TEN_AND_TEN, pipeline_s={"asking": 1.0}, rank=1)
    assert slowest([speed, whole]) is whole
    assert slowest([whole, longer := replace(whole, rounds_s=3.0)]) is longer


seconds = st.floats(1e-2, 10)
works = st.builds(
    work,
    st.lists(st.builds(step, st.sampled_from("AB"), seconds, st.booleans()), min_size=2, max_size=40),
    syncing_s=st.floats(0, 100),
    pipeline_s=st.fixed_dictionaries({name: st.floats(0, 300) for name in (*WORKING, "idle")}),
).filter(lambda speed: not speed.lacks)


@given(works, st.integers(1, 40))
def test_the_numbers_of_any_run_fit_each_other(speed: Speed, num_b_run: int) -> None:
    facts = speed.facts
    assert facts["fraction"] == pytest.approx(facts["speed_up"] / facts["bound"])
    assert 1 <= facts["bound"] <= 2 + 1e-9  # two actors side by side
    assert speed.learner_binds == (facts["ideal_s"] > speed.rollouts_s)
    if speed.rollouts_s > 1e-6:  # the ratio proposed is one that the rollouts feed
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
    first, *_ = told_of(work(TEN_AND_TEN, pipeline_s=pipeline_s), summary())
    assert first.startswith(binds)
    assert first.endswith(f" The rollouts sustain stage2_ab.schedule.b_ratio {advice}")


def test_every_other_loss_is_told_by_itself() -> None:
    steps = TEN_AND_TEN + [step("A", 0.25, is_quiet=False)] * 10
    speed = work(steps, syncing_s=2.0, pipeline_s={"asking": 1.0})
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
    speed = work(steps, pipeline_s={"asking": 1.0})
    skips = {"not_enough_packs": 4, "servers_suspect": 2}
    told = summary(num_steps=30, num_b_wanted=30, skips=skips)
    (no_server,) = told_of(speed, told)
    assert "2 wanted B steps did not run: no proven server was left" in no_server


@pytest.mark.parametrize(
    ("skips", "names"),
    [
        ({"not_enough_packs": 4}, ["doctor --live"]),
        ({"truncation_guard": 4}, ["rollout.decoding.max_new_tokens"]),
        ({"servers_suspect": 4}, ["Sync rounds"]),
    ],
)
def test_steps_that_were_skipped_come_with_a_setting_or_a_section(
    skips: dict[str, int], names: list[str]
) -> None:
    """Two of six: what trained was hidden whole, and yet the run did not do what was wanted."""
    speed = work(TEN_AND_TEN, pipeline_s={"asking": 1.0})
    told = summary(num_b_run=2, num_b_wanted=6, skips=skips)
    section = verdict_section(speed, told)
    sentences = " ".join(part.text for part in section.parts if isinstance(part, Sentence))
    assert all(name in sentences for name in names)
    headline = next(part for part in section.parts if isinstance(part, Table) and part.is_headline)
    assert ("reached", "100%", "of the bound for the 2 B steps that ran") in headline.rows
