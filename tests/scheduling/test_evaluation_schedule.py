"""When evaluations begin and end: named cases, and every history of agreed facts against what must never happen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, EvaluationSchedule, RunningEvaluation
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.version_schedule import VersionSchedule

WELL: dict[str, Any] = {
    "wanted": True,
    "has_server": True,
    "pipeline_failed": False,
    "stop_requested": False,
}


def make(every: int = 10, delay: int = 3, last: int = 1000) -> EvaluationSchedule:
    return EvaluationSchedule(every_steps=every, max_round_delay_steps=delay, last_step=last)


def begun(schedule: EvaluationSchedule, steps: range, version: int = 7) -> list[RunningEvaluation]:
    """The evaluations that begin at ``steps`` if they may at each, and end at once."""
    all_begun = []
    for step in steps:
        if (running := schedule.begin_if_due(step, version, may_begin=True)) is not None:
            all_begun.append(running)
            schedule.end()
    return all_begun


def test_one_falls_due_at_every_positive_multiple() -> None:
    assert begun(make(), range(35)) == [RunningEvaluation(step, step, 7) for step in (10, 20, 30)]
    assert [running.due_step for running in begun(make(), range(15, 35))] == [20, 30], "also after a resume"


def test_it_holds_a_round_for_so_many_steps_and_is_then_cut() -> None:
    schedule = make(delay=3)
    assert not schedule.holds_round(9), "nothing runs"
    schedule.begin_if_due(10, 1, may_begin=True)
    assert [schedule.holds_round(step) for step in range(12, 15)] == [True] * 3
    assert not schedule.is_cut
    assert not schedule.holds_round(15)
    assert schedule.is_cut
    schedule.end()
    assert not schedule.is_cut
    schedule.begin_if_due(20, 2, may_begin=True)
    assert schedule.holds_round(40), "the next one counts anew"


def test_without_delay_a_round_is_never_held() -> None:
    schedule = make(delay=0)
    schedule.begin_if_due(10, 1, may_begin=True)
    assert not schedule.holds_round(11)
    assert schedule.reason_to_end(11, **WELL) is None, "the round waits for what is in flight"
    assert schedule.reason_to_end(12, **(WELL | {"wanted": False})) is EvaluationEnd.ROUND_DUE


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        ({}, None),
        ({"wanted": False}, EvaluationEnd.COMPLETE),
        ({"wanted": False, "has_server": False}, EvaluationEnd.COMPLETE),
        ({"has_server": False}, EvaluationEnd.NO_SERVER),
        ({"pipeline_failed": True, "has_server": False}, EvaluationEnd.PIPELINE_FAILED),
        ({"stop_requested": True}, EvaluationEnd.TRAINING_ENDS),
    ],
)
def test_why_it_ends(facts: dict[str, bool], end: EvaluationEnd | None) -> None:
    schedule = make()
    assert schedule.reason_to_end(9, **(WELL | facts)) is None, "nothing runs"
    schedule.begin_if_due(10, 1, may_begin=True)
    assert schedule.reason_to_end(11, **(WELL | facts)) == end


def test_the_last_step_ends_it_and_begins_none() -> None:
    schedule = make(last=12)
    schedule.begin_if_due(10, 1, may_begin=True)
    assert schedule.reason_to_end(11, **WELL) is None
    assert schedule.reason_to_end(12, **WELL) is EvaluationEnd.TRAINING_ENDS
    assert make(last=10).begin_if_due(10, 1, may_begin=True) is None


def test_the_final_one_begins_behind_the_last_step_and_cuts_what_runs() -> None:
    schedule = make(last=50)
    schedule.begin_if_due(10, 1, may_begin=True)
    schedule.ask_for_final(20)  # an early end, at which one falls due anyway
    assert schedule.reason_to_end(20, **WELL) is EvaluationEnd.TRAINING_ENDS
    schedule.end(again=True)
    assert schedule.begin_if_due(20, 1, may_begin=False) is None, "its round is not over"
    assert schedule.begin_if_due(20, 2, may_begin=True) == RunningEvaluation(20, 20, 2)
    assert schedule.reason_to_end(20, **WELL) is None
    assert schedule.reason_to_end(20, **(WELL | {"stop_requested": True})) is EvaluationEnd.TRAINING_ENDS
    assert schedule.reason_to_end(20, **(WELL | {"wanted": False})) is EvaluationEnd.COMPLETE
    schedule.end()
    assert schedule.begin_if_due(20, 2, may_begin=True) is None, "it comes once"
    assert schedule.unfinished is None


def test_what_had_not_ended_begins_again_after_a_resume() -> None:
    schedule = make()
    assert schedule.unfinished is None
    schedule.begin_if_due(10, 1, may_begin=False)
    assert schedule.unfinished == 10
    schedule.begin_if_due(11, 1, may_begin=True)
    assert schedule.unfinished == 10
    resumed = make()
    resumed.resume(schedule.unfinished)
    assert resumed.begin_if_due(13, 2, may_begin=True) == RunningEvaluation(10, 13, 2)
    schedule.end()
    assert schedule.unfinished is None


class Run(RuleBasedStateMachine):
    """Steps with any facts, beside versions and the life of one server, driven as the learner drives them."""

    @initialize(
        every=st.integers(1, 6),
        delay=st.integers(0, 4),
        cadence=st.integers(1, 4),
        last=st.integers(5, 60),
        stages=st.booleans(),
    )
    def begin(self, every: int, delay: int, cadence: int, last: int, stages: bool) -> None:
        self.every, self.delay, self.last = every, delay, last
        self.schedule = make(every, delay, last)
        self.versions = VersionSchedule(cadence)
        self.versions.begin(0)
        self.life = ServerLife(1, 64, stages=stages, state=LifeState.PROVEN, version=1)
        self.step, self.version = 0, 1
        self.due_since: int | None = None
        self.begun_steps: list[int] = []

    @rule(
        drained=st.booleans(),
        ends=st.booleans(),
        proves=st.sampled_from([True, True, True, False]),
        lost=st.sampled_from([False] * 6 + [True]),
        back=st.booleans(),
        wanted=st.booleans(),
        failed=st.sampled_from([False] * 30 + [True]),
    )
    def next_step(
        self, *, drained: bool, ends: bool, proves: bool, lost: bool, back: bool, wanted: bool, failed: bool
    ) -> None:
        self.step += 1
        step, schedule, versions, life = self.step, self.schedule, self.versions, self.life
        waits = life.state is LifeState.READY and life.wants(0, step)
        is_due = versions.is_due(step, any_proven=life.version > 0, server_waits=waits)
        is_under_way = life.is_pushing or life.is_closed
        if not is_due:
            self.due_since = None  # its servers were lost
        elif self.due_since is None:
            self.due_since = step
        if is_due and not schedule.holds_round(step) and not is_under_way:
            versions.begin(step)
            self.due_since = None
            (life.push if life.stages else life.drain)()
        if self.due_since is not None:
            assert is_under_way or step - self.due_since < self.delay, "a version is held for too long"
        if life.state is LifeState.DRAINING and drained:
            life.push()
        if life.is_pushing and ends and (not proves or not life.proved(versions.begun)):
            life.failed(step)
        if lost:
            life.failed(step)
        if back:
            life.answered()
        self.version = max(self.version, life.version)
        is_under_way = life.is_pushing or life.is_closed
        schedule.observe_version(self.version)
        reason = schedule.reason_to_end(
            step, wanted=wanted, has_server=life.version > 0, pipeline_failed=failed, stop_requested=False
        )
        if reason is not None:
            schedule.end()
        may_begin = reason is None and life.version > 0 and not failed
        may_begin = may_begin and not is_under_way and versions.pending_step is None
        running = schedule.begin_if_due(step, self.version, may_begin=may_begin)
        if running is not None:
            assert running.due_step % self.every == 0
            assert 0 < running.due_step <= running.begun_step == step
            assert not self.begun_steps or running.due_step > self.begun_steps[-1], "one is begun twice"
            self.begun_steps.append(running.due_step)
        if schedule.running is not None:
            assert schedule.is_cut or schedule.running.version == self.version, "the version moved under it"
            assert life.version, "an evaluation runs without a server"
            assert step < self.last
        elif may_begin and step < self.last:
            assert schedule.unfinished is None, "what is due and may begin does"


Run.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestRun = Run.TestCase


def test_one_that_falls_due_too_late_to_begin_wakes_nobody() -> None:
    schedule = make(every=5, last=11)
    found = []
    for step in range(12):
        schedule.begin_if_due(step, 1, may_begin=False)
        found.append(schedule.could_begin_after(step))
    assert found == [False] * 5 + [True] * 5 + [False] * 2
