"""When a server that comes late takes the last round's weights, and when it waits for the next round."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from swift_stage2.scheduling.round_schedule import RoundSchedule

NUM_SERVERS = 3


def _observe(
    schedule: RoundSchedule, step: int, *, suspect: Iterable[int] = (), answers: Iterable[int] = ()
) -> None:
    suspects, answering = set(suspect), set(answers)
    servers = range(len(schedule.states()))
    schedule.observe(
        step,
        suspect=[server in suspects for server in servers],
        answers_again=[server in answering for server in servers],
    )


def _begun(
    *, staging: Iterable[int] = (0, 1), every: int = 10, proven: Iterable[int] = (0, 1)
) -> RoundSchedule:
    """Two servers, after the first round at step 0."""
    schedule = RoundSchedule(2, every, backoff_steps=1, max_backoff_steps=64, staging=staging)
    assert schedule.is_due(0)
    schedule.begin(0)
    schedule.finish(0, proven=proven, failed=set(range(2)) - set(proven))
    return schedule


def _returned(schedule: RoundSchedule, server: int = 1) -> RoundSchedule:
    """A server was suspected at step 1 and answers again at step 2."""
    _observe(schedule, 1, suspect=[server])
    _observe(schedule, 2, answers=[server])
    return schedule


def test_a_suspect_that_answers_again_takes_the_last_rounds_weights_and_no_round_comes() -> None:
    schedule = _returned(_begun())
    assert not schedule.is_due(3)
    assert schedule.begin_catch_up(3) == (1,)
    assert (schedule.catching_up, schedule.in_transfer, schedule.pending) == (True, False, False)
    assert schedule.version == 1
    assert schedule.finish(4, proven=[1], failed=()) == (1,)
    assert (schedule.proven, schedule.catching_up) == ((0, 1), False)
    assert schedule.version == 1, "of the weights that it brought"
    assert [step for step in range(5, 12) if schedule.is_due(step)] == [10, 11], "the cadence has not moved"


def test_a_round_that_is_due_takes_the_server_along() -> None:
    schedule = _returned(_begun(every=3))
    assert schedule.is_due(3)
    assert schedule.targets(3) == (0, 1)


def test_a_stock_server_waits_for_a_round_and_so_does_who_returns_beside_one() -> None:
    schedule = _returned(_begun(staging=[0]))
    assert schedule.is_due(3)
    schedule = _returned(_begun(staging=[1]))
    assert schedule.is_due(3), "server 0 is a stock one, and is asked"


def test_a_round_that_falls_due_waits_for_the_catch_up() -> None:
    schedule = _returned(_begun(every=5))
    assert schedule.begin_catch_up(3) == (1,)
    assert [schedule.waits_for_catch_up(step) for step in (4, 5, 6)] == [False, True, True]
    assert not any(schedule.is_due(step) for step in (4, 5, 6))
    schedule.finish(6, proven=[1], failed=())
    assert schedule.is_due(7)
    assert schedule.targets(7) == (0, 1)


class Run(RuleBasedStateMachine):
    """Any history of suspicions, answers, rounds and catch-ups; what a server holds is followed beside it."""

    @initialize(
        every=st.integers(1, 5),
        staging=st.sets(st.integers(0, NUM_SERVERS - 1)),
        absent=st.sets(st.integers(0, NUM_SERVERS - 1), max_size=NUM_SERVERS - 1),
    )
    def begin(self, every: int, staging: set[int], absent: set[int]) -> None:
        self.every, self.staging = every, staging
        self.schedule = RoundSchedule(
            NUM_SERVERS, every, backoff_steps=1, max_backoff_steps=8, staging=staging, absent=absent
        )
        self.step = 0
        self.targets: tuple[int, ...] = ()
        self.snapshot = 0  # the version whose weights lie in memory
        self.proven_versions: set[int] = set()

    @rule(
        suspect=st.lists(st.booleans(), min_size=NUM_SERVERS, max_size=NUM_SERVERS),
        answers=st.lists(st.booleans(), min_size=NUM_SERVERS, max_size=NUM_SERVERS),
    )
    def observe(self, suspect: list[bool], answers: list[bool]) -> None:
        self.step += 1
        self.schedule.observe(self.step, suspect=suspect, answers_again=answers)

    @precondition(lambda self: not self.targets)
    @rule()
    def begin_what_can(self) -> None:
        if self.schedule.is_due(self.step):
            self.targets = self.schedule.targets(self.step)
            self.schedule.begin(self.step, staged=self.schedule.are_staging(self.targets))
            assert self.schedule.version > self.snapshot, "no version comes again"
            self.snapshot = self.schedule.version
            return
        before = self.schedule.proven
        self.targets = self.schedule.begin_catch_up(self.step)
        if self.targets:
            assert self.schedule.version == self.snapshot, "only what lies in memory is brought"
            assert self.snapshot in self.proven_versions, "and was proven"
            assert self.staging.issuperset((*self.targets, *before))
            assert set(self.targets) <= set(self.schedule.suspects)

    @precondition(lambda self: self.targets)
    @rule(works=st.lists(st.booleans(), min_size=NUM_SERVERS, max_size=NUM_SERVERS))
    def finish(self, works: list[bool]) -> None:
        proven = [server for server in self.targets if works[server]]
        failed = [server for server in self.targets if not works[server]]
        if self.schedule.finish(self.step, proven=proven, failed=failed):
            self.proven_versions.add(self.snapshot)
        self.targets = ()

    @invariant()
    def one_thing_at_a_time(self) -> None:
        assert not (self.schedule.in_transfer and self.schedule.catching_up)
        if self.targets:
            assert not self.schedule.falls_due(self.step)
            assert (self.schedule.pending, self.schedule.begin_catch_up(self.step)) == (False, ())

    @invariant()
    def with_proven_servers_a_round_is_never_overdue(self) -> None:
        last = self.schedule.last_commit_step
        is_overdue = last is not None and self.step - last >= self.every
        if self.schedule.proven and is_overdue:
            assert self.schedule.falls_due(self.step) or self.targets
            assert self.schedule.waits_for_catch_up(self.step) == self.schedule.catching_up


Run.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestRun = Run.TestCase


def test_a_server_of_ours_that_was_absent_at_the_start_is_caught_up_without_a_round() -> None:
    schedule = RoundSchedule(2, 8, backoff_steps=4, max_backoff_steps=8, staging=[0], absent=[1])
    assert schedule.targets(0) == (0,)
    schedule.begin(0)
    schedule.finish(0, proven=[0], failed=[])
    assert schedule.begin_catch_up(1) == ()
    schedule.observe(1, suspect=[False, True], answers_again=[False, True])
    schedule.let_stage(1)
    assert not schedule.is_due(2)
    assert schedule.begin_catch_up(2) == (1,), "nothing was tried yet that it would back off from"
    assert schedule.finish(3, proven=[1], failed=[]) == (1,)
    assert schedule.proven == (0, 1)
