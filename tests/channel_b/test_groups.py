"""What a group is worth, against numpy; and whatever befalls its members, each has one place and every group ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from detection_task import make_task
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swift_stage2.channel_b.attempts import AttemptOutcomes
from swift_stage2.channel_b.groups import ComparedGroup, Groups, GroupSettings, Member, compare
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.config import GrpoConfig, Objective
from swift_stage2.records import ReturnReason, Rollout, Sample, SampleKey, UnusedReason, VersionSpan
from swift_stage2.scheduling.version_clock import VersionClock

NUM_ROWS = 5
WINDOW = 1
MAX_ATTEMPTS = 3


def rollout_of(key: SampleKey, version: int = 0) -> Rollout:
    return Rollout(Sample(key, {}), "", (1,), (1,), False, 1, "s", (VersionSpan(version, 0, 1),), (-0.5,))


def members_of(rewards: Sequence[float], target_reward: float | None = None) -> list[Member]:
    return [
        Member(rollout_of(SampleKey(0, number, 3)), reward, target_reward)
        for number, reward in enumerate(rewards)
    ]


def settings_of(objective: Objective = Objective.GRPO, **grpo: Any) -> GroupSettings:
    return GroupSettings(objective, GrpoConfig(**grpo))


def advantages_of(group: ComparedGroup) -> list[tuple[float, ...]]:
    return [rollout.advantages or () for rollout in group.trained]


# --- the comparison ----------------------------------------------------------------------------------

rewards_of_a_group = st.lists(st.integers(-4, 10).map(lambda quarters: quarters / 4), min_size=1, max_size=8)
jitter = st.sampled_from([0.0, 1e-9])  # as sums of the same terms in another order have


@given(rewards_of_a_group, jitter, st.booleans(), st.integers(2, 4))
def test_advantages_are_those_that_numpy_finds(
    rewards: list[float], noise: float, by_std: bool, min_group: int
) -> None:
    rewards = [reward + noise * number for number, reward in enumerate(rewards)]
    members = members_of(rewards)
    found = compare(members, settings_of(scale_by_std=by_std, min_group=min_group))
    keys = [member.rollout.sample.key for member in members]
    if len(rewards) < min_group:
        assert found == ComparedGroup((), tuple(keys), UnusedReason.TOO_SMALL)
    elif np.ptp(rewards) < 1e-6:
        assert found == ComparedGroup((), tuple(keys), UnusedReason.NO_VARIANCE)
    else:
        spread = np.std(rewards, ddof=1)
        expected = (np.array(rewards) - np.mean(rewards)) / (spread + 1e-4 if by_std else 1)
        assert advantages_of(found) == [(pytest.approx(each, abs=1e-12),) for each in expected]
        assert [rollout.sample.key for rollout in found.trained] == keys
        assert (found.unused, found.reason) == ((), None)
        assert found.reward_std == pytest.approx(spread)


@given(rewards_of_a_group.filter(lambda rewards: len(rewards) > 1), st.integers(-4, 10), st.booleans())
def test_a_corrected_answer_in_its_group_is_one_more_member(
    rewards: list[float], target_quarters: int, by_std: bool
) -> None:
    members = members_of(rewards, target_quarters / 4)
    found = compare(members, settings_of(scale_by_std=by_std, target_in_group=True))
    everyone = np.array([*rewards, target_quarters / 4])
    if np.ptp(everyone) < 1e-6:
        assert (found.trained, found.reason) == ((), UnusedReason.NO_VARIANCE)
        return
    expected = (everyone - everyone.mean()) / (everyone.std(ddof=1) + 1e-4 if by_std else 1)
    best = int(np.argmax(rewards))
    values = [(each,) for each in expected[:-1]]
    values[best] += (expected[-1],)
    assert advantages_of(found) == [pytest.approx(each, abs=1e-12) for each in values]
    assert (found.unused, found.reason) == ((), None)


@given(rewards_of_a_group, st.sampled_from([0.5, 2.0]))
def test_mixed_trains_the_best_ones_corrected_answer_whatever_the_rewards_are(
    rewards: list[float], weight: float
) -> None:
    members = members_of(rewards)
    found = compare(members, settings_of(Objective.MIXED, target_weight=weight))
    keys = [member.rollout.sample.key for member in members]
    if len(rewards) < 2:
        assert (found.trained, found.unused) == ((), tuple(keys))
        return
    best = int(np.argmax(rewards))
    trained = {rollout.sample.key: rollout.advantages or () for rollout in found.trained}
    assert [key for key, values in trained.items() if len(values) == 2] == [keys[best]]
    assert trained[keys[best]][1] == weight
    if np.ptp(rewards) < 1e-6:
        assert trained[keys[best]][0] == 0
        assert found.unused == tuple(key for key in keys if key != keys[best])
        assert found.reason is UnusedReason.NO_VARIANCE
    else:
        pure = compare(members, settings_of())
        assert [values[0] for values in trained.values()] == [values[0] for values in advantages_of(pure)]
        assert (found.unused, found.reason) == ((), None)


# --- positions of the stream -------------------------------------------------------------------------


def source_of(num_generations: int, **changes: int) -> SampleSource:
    rows = [{"id": n, "objects": {"ref": ["x"], "bbox": [[0, 0, 1, 1]]}} for n in range(NUM_ROWS)]
    settings = {"rank": 0, "world_size": 1, "seed": 3} | changes
    return SampleSource(rows, make_task(), num_generations=num_generations, **settings)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_has_its_positions_one_after_another_in_the_order_of_the_plain_stream(
    world_size: int,
) -> None:
    for rank in range(world_size):
        source, plain = (source_of(n, rank=rank, world_size=world_size) for n in (3, 1))
        share = len(range(rank, NUM_ROWS, world_size))
        drawn, rows = source.draw(3 * 2 * share), plain.draw(2 * share)
        assert [key.index for key in drawn] == [key.index for key in rows for _ in range(3)]
        assert [(key.epoch, key.position) for key in drawn] == [
            (epoch, position) for epoch in range(2) for position in range(3 * share)
        ]
        assert [source.group_of(key) for key in drawn] == [
            (epoch, number) for epoch in range(2) for number in range(share) for _ in range(3)
        ]


# --- whatever befalls them ---------------------------------------------------------------------------


class Lives(RuleBasedStateMachine):
    """Source, ends and groups, against what is known here of every sample that was drawn."""

    @initialize(
        num_generations=st.integers(2, 4),
        min_group=st.integers(2, 3),
        objective=st.sampled_from([Objective.GRPO, Objective.MIXED]),
        redraw=st.booleans(),
    )
    def begin(self, num_generations: int, min_group: int, objective: Objective, redraw: bool) -> None:
        self.num_generations, self.min_group = num_generations, min(min_group, num_generations)
        self.objective, self.redraw = objective, redraw
        self.clock = VersionClock()
        self.in_flight: list[SampleKey] = []
        self.passed_on: list[SampleKey] = []
        self.ended: Counter[tuple[int, int]] = Counter()
        self.compared: set[SampleKey] = set()
        self.compared_groups: set[tuple[int, int]] = set()
        self.num_drawn = 0
        self.open(source_of(num_generations))

    def open(self, source: SampleSource) -> None:
        """A process begins."""
        self.source = source
        settle = source.settle_unused

        def settle_unused(keys: Sequence[SampleKey], reason: UnusedReason) -> None:
            settle(keys, reason)
            self.end(keys)

        source.settle_unused = settle_unused  # type: ignore[method-assign]
        events: Any = SimpleNamespace(
            count=self.count,
            quarantined=lambda key, *_: self.end([key]),
        )
        self.ends = AttemptOutcomes(source, events, redraw_dropped=self.redraw, max_attempts=MAX_ATTEMPTS)
        self.groups = Groups(
            self.ends,
            settings=settings_of(self.objective, min_group=self.min_group),
            source=source,
            clock=self.clock,
            version_window=WINDOW,
        )

    def count(self, name: str, amount: int) -> None:
        self.num_stale += amount * (name == "rollouts_dropped_stale")

    def end(self, keys: Sequence[SampleKey]) -> None:
        self.ended.update((key.epoch, key.position) for key in keys)

    def group_of(self, key: SampleKey) -> tuple[int, int]:
        return key.epoch, key.position // self.num_generations

    def choose(self, data: st.DataObject, keys: list[SampleKey]) -> list[SampleKey]:
        chosen = list(keys)
        if data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.sampled_from(keys), unique=True, min_size=1))
        for key in chosen:
            keys.remove(key)
        return chosen

    @rule(count=st.integers(1, 6))
    def draw(self, count: int) -> None:
        again = list(self.source._again)[:count]
        keys = self.source.draw(count)
        fresh = keys[len(again) :]
        assert keys[: len(again)] == again, "what came back is first, in its order"
        places = [divmod(self.num_drawn + n, self.num_generations * NUM_ROWS) for n in range(len(fresh))]
        assert [(key.epoch, key.position, key.attempt) for key in fresh] == [(*place, 0) for place in places]
        self.num_drawn += len(fresh)
        self.in_flight += keys

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), age=st.integers(0, WINDOW))
    def arrive(self, data: st.DataObject, age: int) -> None:
        for key in self.choose(data, self.in_flight):
            self.add(key, data.draw(st.sampled_from([0.0, 1.0])), max(0, self.clock.current - age))

    def add(self, key: SampleKey, reward: float, version: int) -> None:
        quality = SimpleNamespace(reward={"total": reward})
        scored: Any = SimpleNamespace(target=SimpleNamespace(quality=quality), target_reward=None)
        self.groups.add(rollout_of(key, version), scored)

    @rule(data=st.data(), one_is_late=st.booleans())
    def pass_a_group_on(self, data: st.DataObject, one_is_late: bool) -> None:
        """All that is in flight arrives, and a group more, or all but one, for which it does not wait any longer."""
        self.draw(self.num_generations + self.source.num_to_whole_group)
        late = [self.in_flight.pop()] if one_is_late else []
        for key in self.in_flight:
            age = one_is_late * min(WINDOW, self.clock.current)
            self.add(key, data.draw(st.sampled_from([0.0, 1.0])), self.clock.current - age)
        self.in_flight = late
        self.take(ahead=one_is_late * (1 + data.draw(st.integers(0, 2))))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        keys = self.choose(data, self.in_flight)
        self.source.give_back(keys, ReturnReason.FAILED)
        assert list(self.source._again)[-len(keys) :] == keys, "no attempt counts"

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        for key in self.choose(data, self.in_flight):
            self.ends.quarantine(key, "rollout", "it is poisonous")

    @rule()
    def commit_round(self) -> None:
        self.clock.advance()

    @rule(ahead=st.integers(0, 3))
    def take(self, ahead: int) -> None:
        """``ahead``: the version on its way has so much larger a number, because some were never proven; or 0."""
        oldest = self.clock.current - WINDOW
        here: dict[tuple[int, int], list[SampleKey]] = {}
        at_the_edge = set()
        self.num_stale, num_waiting = 0, len(self.groups.rollouts)
        for rollout in self.groups.rollouts:
            if rollout.version >= oldest:
                here.setdefault(self.group_of(rollout.sample.key), []).append(rollout.sample.key)
                at_the_edge |= (
                    {self.group_of(rollout.sample.key)} if rollout.version < oldest + ahead else set()
                )
        num_fresh = sum(map(len, here.values()))
        taken = list(self.groups.take(last_call=self.clock.current + ahead if ahead else None))
        found = {self.group_of(group.trained[0].sample.key): group for group in taken if group.trained}
        assert self.num_stale == num_waiting - num_fresh
        still = {self.group_of(rollout.sample.key) for rollout in self.groups.rollouts}
        for group, keys in here.items():
            goes_on = group in at_the_edge and len(keys) >= self.min_group
            is_compared = goes_on or not self.to_come(group, keys)
            assert (group not in still) == is_compared, "when it waits for nothing more, and no sooner"
            if is_compared:
                self.look_at(found.pop(group, None), keys)
        assert not found

    def to_come(self, group: tuple[int, int], here: Sequence[SampleKey]) -> bool:
        """Whether any other of its samples may be drawn, asked or asked again."""
        epoch, number = group
        for position in range(number * self.num_generations, (number + 1) * self.num_generations):
            is_drawn = epoch * self.num_generations * NUM_ROWS + position < self.num_drawn
            key = self.source._outstanding.get((epoch, position))
            if not is_drawn or (key is not None and key not in here and key not in self.passed_on):
                return True
        return False

    def look_at(self, group: ComparedGroup | None, keys: Sequence[SampleKey]) -> None:
        assert not self.compared.intersection(keys), "twice"
        self.compared.update(keys)
        trained = [rollout.sample.key for rollout in group.trained] if group is not None else []
        assert not trained or len(keys) >= self.min_group
        assert set(trained) <= set(keys)
        num_corrected = sum(len(advantages) == 2 for advantages in advantages_of(group)) if group else 0
        is_first = not self.compared_groups.intersection(map(self.group_of, keys))
        assert num_corrected == (is_first and bool(trained) and self.objective is Objective.MIXED)
        self.compared_groups.update(map(self.group_of, keys))
        assert all(self.ended[key.epoch, key.position] == (key not in trained) for key in keys)
        self.passed_on += trained

    @precondition(lambda self: self.passed_on)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        keys = self.choose(data, self.passed_on)
        self.source.settle_trained(keys, pack_id="p", step=0, version=0)
        self.end(keys)

    @precondition(lambda self: self.passed_on)
    @rule(
        data=st.data(),
        reason=st.sampled_from([ReturnReason.STALE, ReturnReason.OVERFLOW, ReturnReason.FAILED]),
    )
    def drop(self, data: st.DataObject, reason: ReturnReason) -> None:
        """A pack, of several groups perhaps: asked again are those that, with what comes, are enough to be compared."""
        passed_on = {key[:2] for key in self.passed_on}
        keys = self.choose(data, self.passed_on)
        num_to_compare = Counter(map(self.group_of, keys))
        for place, key in self.source._outstanding.items():
            num_to_compare[self.group_of(key)] += place not in passed_on
        self.groups.drop(keys, reason)
        for key in keys:
            is_enough = num_to_compare[self.group_of(key)] >= self.min_group
            counts = reason is not ReturnReason.FAILED  # its process was lost, which is nobody's fault
            returns = is_enough and (not counts or (self.redraw and key.attempt + 1 < MAX_ATTEMPTS))
            assert (key._replace(attempt=key.attempt + counts) in self.source._again) == returns
            if returns and not counts:
                self.compared.discard(key)

    @rule(resumes=st.booleans())
    def stop(self, resumes: bool) -> None:
        """What waits goes back; or the process is killed, and all that is outstanding is drawn again by another."""
        if not resumes:
            keys = [rollout.sample.key for rollout in self.groups.take_all()]
            self.source.give_back(keys, ReturnReason.STOPPED)
            assert self.groups.rollouts == []
            return
        state = json.loads(json.dumps(self.source.state_dict()))
        assert state["outstanding"] == sorted(state["outstanding"])
        self.in_flight, self.passed_on, self.compared = [], [], set()
        self.compared_groups = set()
        source = source_of(self.num_generations)
        source.load_state_dict(state)
        self.open(source)

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        waiting = [rollout.sample.key for rollout in self.groups.rollouts]
        places = Counter(
            (key.epoch, key.position)
            for key in (*self.source._again, *self.in_flight, *waiting, *self.passed_on)
        )
        assert places.keys() == self.source._outstanding.keys()
        everything = places + self.ended
        assert everything.total() == self.num_drawn
        assert all(count == 1 for count in everything.values())

    @invariant()
    def it_asks_for_what_nobody_gives_and_for_no_more(self) -> None:
        groups = {self.group_of(rollout.sample.key) for rollout in self.groups.rollouts}
        returned = sum(self.group_of(key) in groups for key in self.source._again)
        unfinished = -self.num_drawn % self.num_generations
        assert self.groups.num_to_ask(self.in_flight) == returned + unfinished

    def teardown(self) -> None:
        """Every group ends once all that it asks for is given, and then asks for nothing."""
        if not hasattr(self, "groups"):
            return
        for _ in range(100):
            for key in self.in_flight:
                self.add(key, 0.0, self.clock.current)
            self.in_flight = []
            self.take(ahead=0)
            if not (num := self.groups.num_to_ask(())):
                break
            self.draw(num)
        assert self.groups.rollouts == []
        self.every_sample_is_in_one_place()


Lives.TestCase.settings = settings(max_examples=100, stateful_step_count=30, report_multiple_bugs=False)
TestLives = Lives.TestCase
