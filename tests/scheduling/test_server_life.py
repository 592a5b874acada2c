"""The life of one server: what each event does in each state, and what holds whatever happens to it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swift_stage2.scheduling.server_life import TRANSITIONS, LifeEvent, LifeState, ServerLife

BACKOFF, MAX_BACKOFF = 2, 8


def life_in(state: LifeState, **settings: int) -> ServerLife:
    return ServerLife(BACKOFF, MAX_BACKOFF, state=state, **settings)


def has_way_to(goal: LifeState, start: LifeState) -> bool:
    """Whether some events lead from ``start`` to ``goal``."""
    reached = {start}
    for _ in LifeState:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    return goal in reached


@pytest.mark.parametrize("state", LifeState)
def test_every_state_has_a_way_out_to_rollouts_and_back(state: LifeState) -> None:
    assert any(before is state and after is not state for (before, _), after in TRANSITIONS.items())
    assert has_way_to(LifeState.PROVEN, state)
    assert has_way_to(LifeState.AWAY, state)


def test_only_a_proof_makes_a_server_that_is_asked() -> None:
    asked = {LifeState.PROVEN, LifeState.UPDATING}
    assert {
        event for (before, event), after in TRANSITIONS.items() if after in asked and before not in asked
    } == {LifeEvent.PROVED}


@pytest.mark.parametrize("state", LifeState)
@pytest.mark.parametrize("event", LifeEvent)
def test_what_the_table_does_not_have_changes_nothing(state: LifeState, event: LifeEvent) -> None:
    life = life_in(state, version=3)
    calls = {
        LifeEvent.ANSWERED: life.answered,
        LifeEvent.DRAIN: life.drain,
        LifeEvent.SLEEP: life.sleep,
        LifeEvent.PUSH: life.push,
        LifeEvent.PROVED: lambda: life.proved(4),
        LifeEvent.FAILED: lambda: life.failed(10),
    }
    counts = calls[event]()
    wanted = TRANSITIONS.get((state, event))
    assert life.state is (wanted or state)
    if event in (LifeEvent.PROVED, LifeEvent.FAILED):
        assert counts == (wanted is not None)
    version = {LifeEvent.PROVED: 4, LifeEvent.FAILED: 0}.get(event, 3) if wanted else 3
    assert life.version == version


@pytest.mark.parametrize(
    ("state", "version", "newest", "wants"),
    [
        (LifeState.AWAY, 0, 5, False),
        (LifeState.READY, 0, 5, True),
        (LifeState.DRAINING, 4, 5, False),
        (LifeState.PUSHING, 4, 5, False),
        (LifeState.UPDATING, 4, 5, False),
        (LifeState.PROVEN, 4, 5, True),
        (LifeState.PROVEN, 5, 5, False),
        (LifeState.ASLEEP, 4, 5, True),
        (LifeState.ASLEEP, 5, 5, False),
    ],
)
def test_who_wants_weights(state: LifeState, version: int, newest: int, wants: bool) -> None:
    assert life_in(state, version=version).wants(newest, step=0) == wants


def test_the_back_off_doubles_up_to_its_limit_and_a_proof_resets_it() -> None:
    life, step, waits = life_in(LifeState.PROVEN, version=1), 10, []
    for _ in range(5):
        life.failed(step)
        life.answered()
        due = next(later for later in range(step, step + 100) if life.wants(2, later))
        waits.append(due - step)
        step = due
        life.push()
    assert waits == [2, 4, 8, 8, 8]
    life.proved(2)
    life.failed(step)
    assert life.retry_step == step + BACKOFF


class Life(RuleBasedStateMachine):
    """Every order of events, as ``Updates`` may give them and as they may come late."""

    @initialize(state=st.sampled_from([LifeState.READY, LifeState.AWAY]), stages=st.booleans())
    def begin(self, state: LifeState, stages: bool) -> None:
        self.life = ServerLife(BACKOFF, MAX_BACKOFF, stages=stages, state=state)
        self.step, self.newest = 0, 1
        self.proven: set[int] = set()

    @rule()
    def a_step_passes_and_a_version_begins(self) -> None:
        self.step, self.newest = self.step + 1, self.newest + 1

    @rule()
    def it_answers(self) -> None:
        self.life.answered()

    @rule(is_drained=st.booleans())
    def updates_look(self, is_drained: bool) -> None:
        """As ``Updates`` does at a step: whoever cannot take weights beside the old ones is drained first."""
        was_asked = bool(self.life.version) and not self.life.is_closed
        if self.life.wants(self.newest, self.step):
            if self.life.stages:
                self.life.push()
            else:
                self.life.drain()
                assert self.life.is_closed
        elif self.life.state is LifeState.DRAINING and is_drained:
            self.life.push()
            assert not was_asked

    @rule()
    def its_push_ends_well(self) -> None:
        was_pushing = self.life.is_pushing
        assert self.life.proved(self.newest) == was_pushing
        if was_pushing:
            self.proven.add(self.newest)

    @rule()
    def it_fails(self) -> None:
        was_away = self.life.state is LifeState.AWAY
        assert self.life.failed(self.step) != was_away
        assert self.life.retry_step <= self.step + MAX_BACKOFF

    @invariant()
    def it_is_asked_under_what_it_has_proven_only(self) -> None:
        life = self.life
        assert not life.version or life.version in self.proven
        assert not life.version or life.state not in (LifeState.AWAY, LifeState.READY)
        if life.state in (LifeState.PROVEN, LifeState.UPDATING):
            assert life.version

    @invariant()
    def one_that_does_not_stage_is_asked_nothing_while_weights_come(self) -> None:
        assert self.life.stages or not self.life.is_pushing or self.life.is_closed


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
