"""Random lives of samples, with crashes in the middle of a line and resumes from any checkpoint, against a model.

The model knows nothing of records: it keeps, per checkpoint, which positions were trained, given up and in hand.
"""

from __future__ import annotations

import copy
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_run import LedgerRun

from swift_stage2.records import ReturnReason, SampleKey

Place = tuple[int, int]


def _place(key: SampleKey) -> Place:
    return (key.epoch, key.position)


@dataclass
class World:
    """The truth about the steps that survive."""

    trained: list[Place] = field(default_factory=list)
    quarantined: list[Place] = field(default_factory=list)
    in_hand: set[Place] = field(default_factory=set)

    @property
    def drawn(self) -> set[Place]:
        return {*self.trained, *self.quarantined, *self.in_hand}


class Life(RuleBasedStateMachine):
    @initialize(num_rows=st.integers(1, 6))
    def begin(self, num_rows: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.num_rows = num_rows
        self.num_runs = self.num_saves = self.num_packs = 0
        self.saves: list[tuple[str, World]] = []
        self.world = World()
        self._begin_process(None)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.log.close()
            self.directory.cleanup()

    def _begin_process(self, state: str | None) -> None:
        self.num_runs += 1
        self.run = LedgerRun(
            Path(self.directory.name), num_rows=self.num_rows, run_id=str(self.num_runs), state=state
        )
        self.drawn: list[SampleKey] = []
        self.matched: list[SampleKey] = []
        self.packs: dict[str, list[SampleKey]] = {}

    def _take(self, data: st.DataObject, keys: list[SampleKey]) -> list[SampleKey]:
        taken: list[SampleKey] = data.draw(
            st.lists(st.sampled_from(keys), unique=True, min_size=1, max_size=3)
        )
        keys[:] = [key for key in keys if key not in taken]
        return taken

    @rule(count=st.integers(1, 4))
    def draw(self, count: int) -> None:
        keys = self.run.draw(count)
        self.drawn += keys
        self.world.in_hand.update(map(_place, keys))

    @precondition(lambda self: self.drawn)
    @rule(data=st.data(), is_answered=st.booleans())
    def ask(self, data: st.DataObject, is_answered: bool) -> None:
        keys = self._take(data, self.drawn)
        if is_answered:
            self.run.match(keys)
            self.matched += keys
        else:
            self.run.ask(keys, end="lost")
            self.drawn += keys

    @precondition(lambda self: self.matched)
    @rule(data=st.data())
    def pack(self, data: st.DataObject) -> None:
        self.num_packs += 1
        name = f"p{self.num_packs}"
        self.packs[name] = self._take(data, self.matched)
        self.run.pack(self.packs[name], name)

    @precondition(lambda self: self.packs)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.packs)))
        keys = self.packs.pop(name)
        self.run.train(keys, name)
        self.world.trained += map(_place, keys)
        self.world.in_hand -= set(map(_place, keys))

    @precondition(lambda self: self.drawn or self.matched or self.packs)
    @rule(data=st.data(), reason=st.sampled_from(ReturnReason))
    def give_back(self, data: st.DataObject, reason: ReturnReason) -> None:
        if self.packs:
            _, keys = self.packs.popitem()
        else:
            keys = self._take(data, self.drawn or self.matched)
        self.run.source.give_back(keys, reason)

    @precondition(lambda self: self.drawn)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        for key in self._take(data, self.drawn):
            self.run.source.settle_quarantined(key, "bad_sample", "why")
            self.world.quarantined.append(_place(key))
            self.world.in_hand.remove(_place(key))

    @rule()
    def save(self) -> None:
        self.num_saves += 1
        self.saves.append((self.run.save(f"save{self.num_saves}"), copy.deepcopy(self.world)))

    @rule(data=st.data(), torn_at=st.none() | st.floats(0, 1))
    def crash_and_begin_again(self, data: st.DataObject, torn_at: float | None) -> None:
        """From any checkpoint ever written, also one that a resume had left behind, or from nothing."""
        self.run.log.close()
        if torn_at is not None:
            self._tear_the_last_line(torn_at)
        state, world = data.draw(st.sampled_from([(None, World()), *self.saves]))
        self.world = copy.deepcopy(world)
        self._begin_process(state)

    def _tear_the_last_line(self, torn_at: float) -> None:
        lines = self.run.path.read_bytes().splitlines(keepends=True)
        kept = 1 + int(torn_at * (len(lines[-1]) - 3))
        os.truncate(self.run.path, sum(map(len, lines[:-1])) + kept)
        if b'"kind":"checkpoint"' in lines[-1]:
            self.saves.pop()  # a checkpoint is written after its record
        found = self.run.account()
        assert found.violations == ()
        assert found.num_damaged == 0

    @invariant()
    def the_account_is_what_happened(self) -> None:
        found = self.run.account()
        assert found.violations == ()
        assert found.num_damaged == 0
        assert found.taken_over == 0
        assert found.drawn == len(self.world.drawn)
        assert found.trained == len(self.world.trained) == len(set(self.world.trained))
        assert sum(found.quarantined.values()) == len(self.world.quarantined)
        assert sum(found.in_hand.values()) == len(self.world.in_hand)
        assert found.in_hand.get("packed", 0) == sum(map(len, self.packs.values()))


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
