from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from swift_stage2.scheduling.round_schedule import AgreedState, RoundSchedule

NONE = (False, False)


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


def _new(num_servers: int, every: int, **settings: int) -> RoundSchedule:
    return RoundSchedule(num_servers, every, **{"backoff_steps": 1, "max_backoff_steps": 64, **settings})


def _run(schedule: RoundSchedule, step: int, *, proven: Iterable[int], failed: Iterable[int]) -> None:
    """A round that ends in the step at which it began."""
    schedule.begin(0)
    schedule.finish(step, proven=proven, failed=failed)


def _begun(num_servers: int = 2, *, every: int = 4, **settings: int) -> RoundSchedule:
    """A schedule whose first round has proven every server at step 0."""
    schedule = _new(num_servers, every, **settings)
    assert schedule.is_due(0)
    _run(schedule, 0, proven=range(num_servers), failed=())
    return schedule


def test_the_first_round_is_due_before_the_first_step_and_asks_every_server() -> None:
    schedule = _new(3, 4)
    assert (schedule.pending, schedule.last_commit_step) == (False, None)
    assert schedule.is_due(0)
    assert schedule.targets(0) == (0, 1, 2)
    assert (schedule.proven, schedule.suspects) == ((), ())
    assert schedule.states() == (AgreedState.UNPROVEN,) * 3


def test_a_round_is_due_every_so_many_steps_after_the_last_commit() -> None:
    schedule = _begun(every=4)
    rounds = []
    for step in range(1, 21):
        if schedule.is_due(step):
            rounds.append(step)
            _run(schedule, step, proven=(0, 1), failed=())
    assert rounds == [4, 8, 12, 16, 20]
    assert schedule.last_commit_step == 20


def test_a_round_that_is_asked_for_is_due_once_no_other_runs_and_goes_to_nobody_that_is_lost() -> None:
    schedule = _begun(1)
    schedule.begin(4)
    schedule.is_asked_for = True
    assert not schedule.is_due(4), "another one is in transfer"
    schedule.is_asked_for = True
    schedule.finish(5, proven=[0], failed=())
    assert schedule.is_due(5)
    _run(schedule, 5, proven=(), failed=[0])
    assert not schedule.is_asked_for
    schedule.is_asked_for = True
    assert not schedule.is_due(6), "no server is left"


def test_a_round_stays_pending_until_it_ended_and_counts_from_its_commit() -> None:
    schedule = _begun(every=4)
    assert [schedule.is_due(step) for step in (3, 4, 5, 6)] == [False, True, True, True]
    assert schedule.pending
    _run(schedule, 6, proven=(0, 1), failed=())
    assert not schedule.pending
    assert [step for step in range(7, 12) if schedule.is_due(step)] == [10, 11]


def test_a_server_that_fails_a_round_leaves_the_set_and_does_not_delay_the_rest() -> None:
    schedule = _new(2, 4)
    schedule.is_due(0)
    _run(schedule, 0, proven=[0], failed=[1])
    assert schedule.states() == (AgreedState.PROVEN, AgreedState.SUSPECT)
    assert (schedule.proven, schedule.suspects) == ((0,), (1,))
    assert [step for step in range(1, 5) if schedule.is_due(step)] == [4]
    assert schedule.targets(4) == (0,)


def test_only_an_answer_makes_a_retry_due_and_it_includes_the_proven_ones() -> None:
    schedule = _begun(every=100)
    _observe(schedule, 1, suspect=[1])
    assert not any(schedule.is_due(step) for step in range(2, 50))
    _observe(schedule, 50, answers=[1])
    assert schedule.is_due(51)
    assert schedule.targets(51) == (0, 1)
    _run(schedule, 51, proven=(0, 1), failed=())
    assert schedule.proven == (0, 1)
    assert not schedule.is_due(52)


def test_the_back_off_doubles_up_to_its_limit_and_a_proof_resets_it() -> None:
    schedule = _begun(1, every=10_000, backoff_steps=2, max_backoff_steps=8)
    step = 1
    _observe(schedule, step, suspect=[0])
    waits = []
    for _ in range(5):
        _observe(schedule, step, answers=[0])
        due = next(later for later in range(step, step + 100) if schedule.is_due(later))
        waits.append(due - step)
        step = due
        _run(schedule, step, proven=(), failed=(0,))
    assert waits == [2, 4, 8, 8, 8]
    _observe(schedule, step, answers=[0])
    assert schedule.is_due(step + 8)
    _run(schedule, step + 8, proven=(0,), failed=())
    _observe(schedule, step + 9, suspect=[0])
    _observe(schedule, step + 9, answers=[0])
    assert [schedule.is_due(step + 9 + later) for later in (1, 2)] == [False, True]


def test_while_a_round_is_in_transfer_none_falls_due_and_the_next_counts_from_its_end() -> None:
    schedule = _begun(1, every=4)
    assert schedule.is_due(4)
    schedule.begin(0)
    assert (schedule.pending, schedule.in_transfer) == (False, True)
    assert not any(schedule.is_due(step) for step in range(4, 10))
    schedule.finish(9, proven=[0], failed=())
    assert schedule.last_commit_step == 9
    assert [step for step in range(10, 15) if schedule.is_due(step)] == [13, 14], (
        "servers are asked for as long"
    )


def test_a_stock_server_that_was_absent_at_the_start_makes_a_round_due_once_it_answers() -> None:
    schedule = RoundSchedule(2, 4, backoff_steps=1, max_backoff_steps=64, absent=[1])
    assert schedule.states() == (AgreedState.UNPROVEN, AgreedState.SUSPECT)
    assert (schedule.is_due(0), schedule.targets(0)) == (True, (0,)), "nobody waits for it"
    _run(schedule, 0, proven=[0], failed=())
    assert [schedule.is_due(step) for step in (1, 2)] == [False, False]
    _observe(schedule, 2, suspect=[1], answers=[1])
    assert schedule.is_due(3), "nothing was tried yet that it would back off from"
    assert schedule.targets(3) == (0, 1)
    _run(schedule, 3, proven=[0, 1], failed=())
    assert schedule.proven == (0, 1)


def test_facts_must_cover_every_server() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        _new(3, 4).observe(0, suspect=NONE, answers_again=(False,) * 3)


NUM_SERVERS = 3


class Run(RuleBasedStateMachine):
    """Any history of steps, suspicions, answers and rounds."""

    @initialize(every=st.integers(1, 5), backoff=st.integers(1, 3))
    def begin(self, every: int, backoff: int) -> None:
        self.every = every
        self.schedule = RoundSchedule(NUM_SERVERS, every, backoff_steps=backoff, max_backoff_steps=8)
        self.step = 0
        self.commits: list[int] = []
        self.in_transfer = False
        self.targets: tuple[int, ...] = ()

    @rule()
    def next_step(self) -> None:
        self.step += 1

    @rule(
        suspect=st.lists(st.booleans(), min_size=NUM_SERVERS, max_size=NUM_SERVERS),
        answers=st.lists(st.booleans(), min_size=NUM_SERVERS, max_size=NUM_SERVERS),
    )
    def observe(self, suspect: list[bool], answers: list[bool]) -> None:
        before = self.schedule.proven
        self.schedule.observe(self.step, suspect=suspect, answers_again=answers)
        expected = tuple(server for server in before if not suspect[server])
        assert self.schedule.proven == expected, "facts only withdraw, they never prove"

    @precondition(lambda self: self.schedule.is_due(self.step))
    @rule()
    def begin_round(self) -> None:
        self.targets, self.in_transfer = self.schedule.targets(self.step), True
        self.schedule.begin(0)
        assert not self.schedule.pending

    @precondition(lambda self: self.in_transfer)
    @rule(works=st.lists(st.booleans(), min_size=NUM_SERVERS, max_size=NUM_SERVERS))
    def finish_round(self, works: list[bool]) -> None:
        proven = [server for server in self.targets if works[server]]
        failed = [server for server in self.targets if not works[server]]
        self.schedule.finish(self.step, proven=proven, failed=failed)
        assert self.schedule.proven == tuple(proven), "what a round proved is all that may be asked"
        if proven:
            self.commits.append(self.step)
        self.in_transfer = False

    @invariant()
    def targets_are_never_servers_that_nobody_heard_of(self) -> None:
        states = self.schedule.states()
        targets = self.schedule.targets(self.step)
        assert {server for server, state in enumerate(states) if state is not AgreedState.SUSPECT} <= set(
            targets
        )
        assert set(self.schedule.proven).isdisjoint(self.schedule.suspects)

    @invariant()
    def the_last_commit_is_the_last_round_that_proved_a_server(self) -> None:
        assert self.schedule.last_commit_step == (self.commits[-1] if self.commits else None)

    @invariant()
    def with_proven_servers_a_round_is_never_overdue(self) -> None:
        if self.in_transfer:
            assert not self.schedule.is_due(self.step), "one round at a time"
        elif self.schedule.proven and self.step - self.commits[-1] >= self.every:
            assert self.schedule.is_due(self.step)


Run.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestRun = Run.TestCase
