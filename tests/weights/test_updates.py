"""Updates of all servers, with a publisher that ends pushes when a test says so: every order of what may happen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from recorded_publisher import RecordedPublisher
from stand_in_canary import StandInCanary

from swift_stage2.config.rollout import SyncConfig
from swift_stage2.errors import WeightSyncError
from swift_stage2.scheduling.server_life import LifeState, ServerLife
from swift_stage2.scheduling.version_schedule import VersionSchedule
from swift_stage2.servers.health_check import JoiningServer, ServerKind
from swift_stage2.weights import updates as updates_module
from swift_stage2.weights.snapshot import WeightIdentity
from swift_stage2.weights.snapshots import TakenSnapshot
from swift_stage2.weights.updates import UpdateFacts, UpdateNews, Updates

STAGES = (True, False, False)  # of the servers, by number
SERVERS = range(len(STAGES))
TIMEOUT_S, STRAGGLER_S = 100.0, 10.0
CADENCE = 8


class Snapshots:
    """Without weights; as on a GPU, ``is_copied`` comes true when the test says so."""

    def __init__(self) -> None:
        self.is_copied = True
        self.failure: str | None = None
        self.on_copied: Any = None
        self.export = SimpleNamespace(manifest=lambda: ())

    def wait_copied(self) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)


class Health:
    """Hears what the test says."""

    def __init__(self) -> None:
        self.watched: frozenset[int] = frozenset()
        self.answering: set[int] = set()
        self.joining: list[JoiningServer] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def watch(self, servers: list[int]) -> None:
        self.watched = frozenset(servers)
        self.answering &= self.watched

    def take_answering(self) -> set[int]:
        answering, self.answering = self.answering, set()
        return answering

    def take_joining(self) -> list[JoiningServer]:
        joining, self.joining = self.joining, []
        return joining


class Rank:
    """Rank 0's step as ``LearnerVersions`` has it; what the other ranks say is the test's."""

    def __init__(self, cadence: int = CADENCE) -> None:
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        self.patch = mock.patch.object(updates_module, "time", clock)
        self.patch.start()
        self.publisher, self.snapshots, self.health = RecordedPublisher(), Snapshots(), Health()
        self.lives = [ServerLife(1, 4, stages=stages) for stages in STAGES]
        self.schedule = VersionSchedule(cadence)
        self.told_lost: list[tuple[int, int]] = []
        parts: dict[str, Any] = {
            "snapshots": self.snapshots,
            "publisher": self.publisher,
            "health": self.health,
        }
        self.updates = Updates(
            self.lives,
            **parts,
            sync=SyncConfig(timeout_s=TIMEOUT_S),
            straggler_s=STRAGGLER_S,
            sync_every_steps=cadence,
            on_lost=lambda *lost: self.told_lost.append(lost),
        )
        self.step_number = -1
        self.agreed = UpdateFacts((0,) * len(STAGES), (False,) * len(STAGES), False, False, True)
        self.is_publishing = False
        self.quiet: set[int] = set()  # agreed since it was asked last
        self.asked: tuple[int, ...] = (0,) * len(STAGES)
        self.news: list[UpdateNews] = []

    def begin_if_due(self) -> None:
        step = self.step_number
        if not self.schedule.is_due(step, any_proven=any(self.asked), server_waits=self.agreed.server_waits):
            return
        if self.is_publishing:
            self.updates.hurry("after the first proof")
            return
        assert not self.publisher.running, "the snapshot is changed while it is pushed"
        identity = WeightIdentity("run", self.schedule.begin(step), step)
        canary: Any = StandInCanary().answer() if self.updates.canary_due else None
        file: Any = SimpleNamespace(tensors={})
        self.updates.begin(TakenSnapshot(identity, file, canary), step)

    def step(self, suspect: set[int] | None = None, busy: set[int] | None = None) -> None:
        suspect, busy = suspect or set(), busy or set()
        self.step_number += 1
        self.begin_if_due()
        self.agreed = facts = self.updates.facts(self.step_number)
        if facts.has_update:
            self.news.append(UpdateNews.from_json(self.updates.collect_update().to_json()))
        self.asked = tuple(0 if each in suspect else facts.proven[each] for each in SERVERS)
        drained = {each for each in SERVERS if facts.closed[each]} - busy
        self.is_publishing = facts.publishing or bool(drained)
        self.quiet = {
            each
            for each in SERVERS
            if each in drained or (each in self.quiet and (facts.closed[each] or not self.asked[each]))
        }
        self.updates.apply_agreement(self.asked, suspect, drained)

    def outcomes(self) -> list[tuple[int, tuple[int, ...], bool]]:
        """Version, who was proven, and whether it was a later word of that version."""
        told = [news.outcome for news in self.news if news.outcome is not None]
        return [(each.version, each.proven, each.is_catch_up) for each in told]


@pytest.fixture
def rank() -> Any:
    rank = Rank()
    yield rank
    rank.patch.stop()


@pytest.fixture
def proven(rank: Rank) -> Rank:
    """All servers have proven version 1."""
    rank.step()
    for server in SERVERS:
        rank.publisher.end(server)
    rank.step()
    assert rank.asked == (1, 1, 1)
    return rank


def test_a_server_that_stages_is_asked_on_and_any_other_is_drained_first(proven: Rank) -> None:
    """With one stock server that is barrier, push, barrier, rollouts."""
    publisher = proven.publisher
    while not publisher.running:
        proven.step(busy={1})
    assert (proven.step_number, publisher.running.keys()) == (CADENCE, {0, 2}), "nothing is in flight there"
    assert proven.agreed.proven == (1, 1, 1)
    assert proven.agreed.closed == (False, True, True)
    proven.step(busy={1})
    assert publisher.running.keys() == {0, 2}
    proven.step()
    assert publisher.running.keys() == {0, 1, 2}
    assert publisher.running[0].turn_s > 0 == publisher.running[1].turn_s
    publisher.end(1)
    proven.step()
    assert proven.agreed.proven == (1, 2, 1)
    assert proven.agreed.closed == (False, False, True)
    assert publisher.confirmed == [1, 2]


def test_all_ranks_are_told_once_when_every_push_has_ended_and_of_what_comes_later(proven: Rank) -> None:
    assert proven.outcomes() == [(1, (0, 1, 2), False)]
    proven.step(suspect={0})
    proven.health.answering = {0}
    proven.step()
    assert proven.publisher.pushed[-1] == (0, 1), "the version that is kept is young enough for a retry"
    assert proven.lives[0].state is LifeState.PUSHING
    proven.publisher.end(0)
    proven.step()
    assert proven.outcomes()[1:] == [(1, (0,), True)]


def test_where_the_kept_version_is_too_old_a_server_that_waits_has_another_made(proven: Rank) -> None:
    proven.lives[0].backoff_steps = proven.lives[0]._next_backoff = CADENCE
    proven.step(suspect={0, 1, 2})
    proven.health.answering = {0}
    while proven.step_number < 2 + CADENCE:
        proven.step()
        assert not proven.agreed.server_waits or proven.step_number == 2 + CADENCE
    assert proven.agreed.server_waits
    assert proven.publisher.pushed[-1][1] == 1
    proven.step()
    assert proven.publisher.pushed[-1] == (0, 2)


@pytest.mark.parametrize("is_suspected_first", [True, False])
def test_a_server_that_is_suspected_while_it_is_pushed_is_not_proven_by_that_push(
    proven: Rank, is_suspected_first: bool
) -> None:
    while not proven.publisher.running:
        proven.step()
    if is_suspected_first:
        proven.step(suspect={0})
        proven.publisher.end(0)
    else:
        proven.publisher.end(0)
        proven.step(suspect={0})
    proven.step()
    assert proven.agreed.proven[0] == 0
    assert proven.lives[0].state is LifeState.AWAY
    assert 0 in proven.publisher.dropped


def test_a_server_that_is_lost_is_told_at_once_with_the_version_that_it_had(proven: Rank) -> None:
    proven.publisher.lost = {1}
    proven.step()
    assert proven.told_lost == [(1, 1)]
    assert proven.asked == (1, 0, 1)
    proven.step()
    assert proven.told_lost == [(1, 1)]


def test_a_server_that_is_lost_after_its_proof_is_not_proven(rank: Rank) -> None:
    """A stock server that is back with its first weights looks like the one that has proven others."""
    rank.step()
    rank.step()
    for server in SERVERS:
        rank.publisher.end(server)
    rank.publisher.lost = {1}
    rank.step()
    assert rank.asked == (1, 0, 1)


def test_a_push_has_its_time_and_less_once_another_version_is_due(proven: Rank) -> None:
    while not proven.publisher.running:
        proven.step()
    proven.publisher.end(0)
    proven.now_s += 1.0
    while not proven.schedule.pending_step:
        proven.step()
    proven.now_s += STRAGGLER_S
    proven.step()
    assert proven.publisher.given_up == []
    proven.now_s += 0.1
    proven.step()
    assert len(proven.publisher.given_up) == 1
    assert proven.asked == (2, 0, 0)
    proven.step()
    assert proven.schedule.begun == 3
    assert [server for server, _ in proven.publisher.pushed[-1:]] == [0]
    proven.now_s += TIMEOUT_S + 0.1
    proven.step()
    assert len(proven.publisher.given_up) == 2


def test_an_optimizers_step_begins_pushes_of_which_all_ranks_know(proven: Rank) -> None:
    """Else they may begin a version, and change the snapshot, at the next step."""
    proven.snapshots.is_copied = False
    while proven.schedule.begun < 2:
        proven.step()
    proven.snapshots.on_copied()
    assert (proven.is_publishing, proven.publisher.running) == (True, {})
    proven.snapshots.is_copied = True
    proven.snapshots.on_copied()
    assert proven.publisher.running.keys() == {0, 1, 2}


def test_the_learners_fault_is_told_to_all_ranks(proven: Rank) -> None:
    while not proven.publisher.running:
        proven.step()
    proven.publisher.end(0, fault="weights must be finite")
    proven.step()
    with pytest.raises(WeightSyncError, match="weights must be finite"):
        proven.news[-1].require_no_fault()


def test_a_push_that_cannot_even_begin_fails_its_server(
    proven: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no process can be started")

    monkeypatch.setattr(proven.publisher, "push", refuse)
    while any(proven.asked):
        proven.step()
    assert proven.outcomes()[1:] == [(2, (), False), (2, (), True)], "the two that were drained come later"


def test_a_server_that_joins_is_told_before_weights_are_brought_to_it(rank: Rank) -> None:
    rank.lives[1].state = LifeState.AWAY
    rank.step()
    rank.health.joining, rank.health.answering = [JoiningServer(1, ServerKind(is_ours=True))], {1}
    rank.step()
    assert [each.server for each in rank.news[-1].joining] == [1]
    assert rank.publisher.pushed[-1] == (2, 1) or (1, 1) in rank.publisher.pushed
    assert rank.lives[1].stages


class AnyOrder(RuleBasedStateMachine):
    """The model: what each server has proven by a push that nothing has spoilt since it began."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = Rank(cadence=2)
        self.proven = [0] * len(STAGES)
        self.is_spoilt = [False] * len(STAGES)  # the push that runs, or has ended
        self.ended: dict[int, bool] = {}  # since the last step: whether it was proven
        push = self.rank.publisher.push

        def watched_push(server: int, spec: Any, snapshot: Any) -> None:
            assert STAGES[server] or server in self.rank.quiet, "something may be in flight there"
            assert self.rank.snapshots.is_copied
            self.is_spoilt[server] = False
            push(server, spec, snapshot)

        self.rank.publisher.push = watched_push  # type: ignore[method-assign]

    def teardown(self) -> None:
        """Every state has a way out."""
        try:
            for _ in range(40):
                self.copy_ends()
                self.answer(set(SERVERS))
                self.end(set(SERVERS), proven=True)
                self.step(set(), set())
            assert all(
                life.state in (LifeState.PROVEN, LifeState.UPDATING) or life.is_closed
                for life in self.rank.lives
            )
            assert min(self.rank.lives[server].version for server in SERVERS) >= self.rank.schedule.begun - 1
        finally:
            self.rank.patch.stop()

    servers = st.sets(st.sampled_from(SERVERS))
    often = st.integers(0, 9).map(lambda number: number < 9)

    @rule(busy=servers)
    def step_well(self, busy: set[int]) -> None:
        self.step(set(), busy)

    @rule(suspect=servers, busy=servers, in_time=often)
    def step(self, suspect: set[int], busy: set[int], in_time: bool = True) -> None:
        rank = self.rank
        if not in_time:
            rank.now_s += TIMEOUT_S + 1
            self.ended |= dict.fromkeys(rank.publisher.running, False)
        lost = set(rank.publisher.lost)
        for server, is_proven in self.ended.items():
            if not self.is_spoilt[server]:
                self.proven[server] = self._version_of(server) if is_proven and server not in lost else 0
        self.ended = {}
        for server in lost - rank.publisher.running.keys():
            self.proven[server] = 0
        rank.step(suspect, busy)
        assert rank.agreed.proven == tuple(self.proven)
        for server in suspect:
            self.proven[server], self.is_spoilt[server] = 0, True
        self.rank.snapshots.on_copied()  # as every optimizer step calls it on a GPU

    def _version_of(self, server: int) -> int:
        return next(version for each, version in reversed(self.rank.publisher.pushed) if each == server)

    @rule(servers=servers, proven=often)
    def end(self, servers: set[int], proven: bool) -> None:
        for server in servers & self.rank.publisher.running.keys():
            self.rank.publisher.end(server, None if proven else "it died")
            self.ended[server] = proven

    @rule(server=st.sampled_from(SERVERS))
    def lose(self, server: int) -> None:
        if self.rank.lives[server].version and not STAGES[server]:
            self.rank.publisher.lost.add(server)

    @rule(servers=servers)
    def answer(self, servers: set[int]) -> None:
        self.rank.health.answering |= servers & self.rank.health.watched

    @rule()
    def copies_are_late(self) -> None:
        if not self.rank.publisher.running:
            self.rank.snapshots.is_copied = False

    @rule()
    def copy_ends(self) -> None:
        self.rank.snapshots.is_copied = True

    @invariant()
    def only_the_newest_version_is_pushed(self) -> None:
        running = {spec.identity.version for spec in self.rank.publisher.running.values()}
        assert running <= {self.rank.schedule.begun}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
