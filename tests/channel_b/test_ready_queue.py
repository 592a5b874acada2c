from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue, Reservation
from swift_stage2.errors import QueueClosed, ReservationSpent


@dataclass(frozen=True)
class Pack:
    """All that "a pack is anything with .version" promises, and a name."""

    version: int
    name: int = 0


@dataclass(frozen=True)
class CountedPack(Pack):
    num_supervised_tokens: int = 0


def filled(*versions: int, limit: int = 8, window: int = 1) -> tuple[ReadyQueue, list[tuple[int, str]]]:
    """A queue with packs named 0, 1, … offered while the version was 1, and the list of its drops."""
    drops: list[tuple[int, str]] = []
    queue = ReadyQueue(limit, window, lambda pack, reason: drops.append((pack.name, reason)))
    for name, version in enumerate(versions):
        queue.offer(Pack(version, name), current_version=1)
    return queue, drops


def reserved(queue: ReadyQueue, n: int, version: int = 1) -> Reservation:
    reservation = queue.reserve(n, current_version=version)
    assert reservation is not None
    return reservation


def names(packs: list[Pack]) -> list[int]:
    return [pack.name for pack in packs]


@pytest.mark.parametrize("is_taken", [True, False])
def test_there_is_room_for_a_pack_that_pushes_no_young_one_out_now_or_when_packs_are_released(
    is_taken: bool,
) -> None:
    queue, drops = filled(1, 2, limit=2)
    assert [queue.has_room(oldest) for oldest in (1, 2, 3)] == [False, True, True]
    reservation = reserved(queue, 1)
    assert not queue.has_room(1)
    reservation.take() if is_taken else reservation.release()
    assert queue.has_room(1) == is_taken
    if is_taken:
        queue.offer(Pack(2), current_version=2)
    assert (drops, queue.has_room(1)) == ([], False)


@pytest.mark.parametrize(("first", "second"), [("take", "take"), ("take", "release"), ("release", "take")])
def test_any_other_second_call_is_an_error_and_changes_nothing(first: str, second: str) -> None:
    queue, _ = filled(1, 1)
    reservation = reserved(queue, 1)
    getattr(reservation, first)()
    depth = queue.depth
    with pytest.raises(ReservationSpent, match=rf"got {second}\(\)"):
        getattr(reservation, second)()
    assert queue.depth == depth


def test_min_tokens_counts_the_packs_it_would_take() -> None:
    queue = ReadyQueue(8, 1)
    for tokens in (10, 20, 500):
        queue.offer(CountedPack(1, num_supervised_tokens=tokens), current_version=1)
    assert queue.reserve(2, current_version=1, min_tokens=31) is None
    assert queue.depth == 3
    assert queue.reserve(2, current_version=1, min_tokens=30) is not None


def test_close_refuses_newcomers_and_keeps_open_reservations() -> None:
    queue, _ = filled(1, 1)
    kept, returned = reserved(queue, 1), reserved(queue, 1)
    queue.close()
    queue.close()
    with pytest.raises(QueueClosed):
        queue.offer(Pack(1), current_version=1)
    with pytest.raises(QueueClosed):
        queue.reserve(1, current_version=1)
    assert names(kept.take()) == [0]
    returned.release()
    assert queue.depth == 1


def test_drops_are_reported_outside_the_lock() -> None:
    """The callback waits for another thread that uses the queue: under the lock it would never come."""
    answered: list[bool] = []

    def ask_from_elsewhere(pack: Pack, reason: DropReason) -> None:
        thread = threading.Thread(target=queue.peek_versions, daemon=True)
        thread.start()
        thread.join(timeout=60)
        answered.append(not thread.is_alive())

    queue = ReadyQueue(1, 0, ask_from_elsewhere)
    queue.offer(Pack(1), current_version=1)
    queue.offer(Pack(1), current_version=1)  # overflow
    held = reserved(queue, 1)
    queue.offer(Pack(1), current_version=1)
    held.release()  # overflow by release
    queue.reserve(1, current_version=2)  # stale
    assert answered == [True, True, True]


class QueueAgainstAList(RuleBasedStateMachine):
    """The queue beside a plain list that does what the words say."""

    @initialize(limit=st.integers(1, 5), window=st.integers(0, 3))
    def make(self, limit: int, window: int) -> None:
        self.limit, self.window = limit, window
        self.current, self.next_name = 3, 0
        self.ready: list[Pack] = []
        self.expected_drops: list[tuple[Pack, str]] = []
        self.drops: list[tuple[Pack, str]] = []
        self.queue = ReadyQueue(limit, window, lambda p, reason: self.drops.append((p, reason)))
        self.held: list[tuple[Reservation, list[Pack]]] = []

    def purge(self, behind: int) -> None:
        stale = [pack for pack in self.ready if pack.version < self.current - behind - self.window]
        self.expected_drops += [(pack, "dropped_stale") for pack in stale]
        self.ready = [pack for pack in self.ready if pack not in stale]

    def trim(self) -> None:
        while len(self.ready) > self.limit:
            self.expected_drops.append((self.ready.pop(0), "dropped_oldest"))

    @rule(age=st.integers(-2, 5), behind=st.integers(0, 2))
    def offer(self, age: int, behind: int) -> None:
        """``behind``: the caller holds an older idea of the current version."""
        pack = Pack(self.current - age, self.next_name)
        self.next_name += 1
        self.queue.offer(pack, current_version=self.current - behind)
        self.ready.append(pack)
        self.purge(behind)
        self.trim()

    @rule(n=st.integers(0, 6), behind=st.integers(0, 2))
    def reserve(self, n: int, behind: int) -> None:
        reservation = self.queue.reserve(n, current_version=self.current - behind)
        self.purge(behind)
        assert (reservation is not None) == (len(self.ready) >= n)
        if reservation is not None:
            self.held.append((reservation, self.ready[:n]))
            self.ready = self.ready[n:]

    @precondition(lambda self: self.held)
    @rule()
    def take(self) -> None:
        reservation, packs = self.held.pop()
        assert reservation.take() == packs

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        reservation, packs = self.held.pop()
        reservation.release()
        self.ready = packs + self.ready
        self.trim()

    @rule()
    def advance(self) -> None:
        self.current += 1

    @invariant()
    def agrees(self) -> None:
        assert self.queue.peek_versions() == tuple(pack.version for pack in self.ready)
        assert self.drops == self.expected_drops
        assert self.queue.depth == len(self.ready)


QueueAgainstAList.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestQueueAgainstAList = QueueAgainstAList.TestCase
