"""One producer, several consumers: order, room for one, who is waited for, and what ends a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.push import BucketHandover

LIMIT_S = 20.0


def new_handover(
    *consumers: int, deadline_s: float = LIMIT_S, patience_s: float = LIMIT_S
) -> BucketHandover[str]:
    return BucketHandover(consumers, Deadline(deadline_s), patience_s=patience_s)


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls for a state that another thread must reach; the deadline is the failure."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the state was not reached"
        time.sleep(0.001)


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def take_all(handover: BucketHandover[str], consumer: int) -> list[str]:
    items = []
    while (item := handover.take(consumer)) is not None:
        items.append(item)
    handover.leave(consumer)
    return items


def produce(handover: BucketHandover[str], *items: str) -> list[bool]:
    offered = [handover.offer(item) for item in items]
    handover.finish()
    return offered


def test_every_consumer_gets_every_item_in_order(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0, 1, 2)
    items = [f"bucket {number}" for number in range(50)]
    taken = [threads.submit(take_all, handover, consumer) for consumer in range(3)]
    assert produce(handover, *items) == [True] * 50
    assert [future.result(LIMIT_S) for future in taken] == [items] * 3


def test_the_producer_is_never_more_than_one_item_ahead(threads: ThreadPoolExecutor) -> None:
    """So at most two buckets wait in memory, besides those that pushes are sending."""
    handover = new_handover(0)
    made: list[str] = []

    def make() -> None:
        for name in ("a", "b", "c"):
            made.append(name)
            handover.offer(name)
        handover.finish()

    producing = threads.submit(make)
    wait_until(lambda: made == ["a", "b"])  # "a" is held, "b" waits for room
    for taken, made_by_then in (("a", ["a", "b", "c"]), ("b", ["a", "b", "c"])):
        assert handover.take(0) == taken
        wait_until(lambda expected=made_by_then: made == expected)  # type: ignore[misc]
    assert handover.take(0) == "c"
    producing.result(LIMIT_S)
    assert handover.take(0) is None


def test_a_fast_consumer_holds_the_next_item_before_a_slow_one_has_room(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0, 1)
    assert handover.offer("a")
    assert handover.take(0) == "a"  # 1 still holds its own
    producing = threads.submit(handover.offer, "b")
    assert handover.take(0) == "b"
    assert not producing.done()
    assert handover.take(1) == "a"
    assert producing.result(LIMIT_S)
    assert handover.take(1) == "b"


def test_who_ends_is_no_longer_waited_for(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0, 1)
    assert handover.offer("a")
    assert handover.take(0) == "a"
    producing = threads.submit(handover.offer, "b")
    assert handover.take(0) == "b"
    handover.leave(1)  # its server died with "a" unsent
    assert producing.result(LIMIT_S)


def test_with_nobody_left_nothing_more_is_made(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0)
    assert handover.offer("a")
    producing = threads.submit(handover.offer, "b")
    handover.leave(0)
    assert producing.result(LIMIT_S) is False
    assert handover.offer("c") is False


def test_a_consumer_that_keeps_others_waiting_is_left_behind_and_told(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0, 1, patience_s=0.05)
    fast = threads.submit(take_all, handover, 0)
    assert produce(handover, "a", "b", "c") == [True] * 3  # 1 takes nothing at all
    assert fast.result(LIMIT_S) == ["a", "b", "c"]
    with pytest.raises(ServerFault, match=r"kept faster servers waiting for 0\.1 s"):
        handover.take(1)


def test_patience_counts_only_while_another_has_nothing_to_do(threads: ThreadPoolExecutor) -> None:
    """Two servers that are equally slow, or one alone, are waited for until the deadline."""
    handover = new_handover(0, 1, deadline_s=LIMIT_S, patience_s=0.0)
    assert handover.offer("a")
    producing: Future[bool] = threads.submit(handover.offer, "b")
    with pytest.raises(TimeoutError):  # both still send; neither is left behind, though there is no patience
        producing.result(0.2)
    assert handover.take(0) == "a"
    assert handover.take(1) == "a"
    assert producing.result(LIMIT_S)
    assert (handover.take(0), handover.take(1)) == ("b", "b")


def test_a_failing_producer_ends_every_consumer_with_its_reason(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0, 1)
    assert handover.offer("a")
    assert handover.take(0) == "a"
    waiting = threads.submit(handover.take, 0)
    handover.fail("weights must be finite")
    with pytest.raises(WeightSyncError, match="weights must be finite"):
        waiting.result(LIMIT_S)
    with pytest.raises(WeightSyncError, match="weights must be finite"):
        handover.take(1)  # although it held an item


def test_a_consumer_waits_no_longer_than_the_deadline() -> None:
    handover = new_handover(0, deadline_s=0.05)
    with pytest.raises(ServerFault, match="before the last bucket came"):
        handover.take(0)


def test_the_producer_waits_no_longer_than_the_deadline() -> None:
    handover = new_handover(0, 1, deadline_s=0.05)
    assert handover.offer("a")
    assert handover.offer("b") is False
    for consumer in (0, 1):
        with pytest.raises(ServerFault, match="had not taken every bucket by the deadline"):
            handover.take(consumer)


def test_after_the_last_item_a_consumer_still_takes_what_it_holds() -> None:
    handover = new_handover(0)
    handover.offer("a")
    handover.finish()
    assert handover.take(0) == "a"
    assert handover.take(0) is None


def test_a_taken_wait_wakes_at_once_when_the_item_comes(threads: ThreadPoolExecutor) -> None:
    handover = new_handover(0)
    asked = threading.Event()

    def take() -> str | None:
        asked.set()
        return handover.take(0)

    waiting = threads.submit(take)
    assert asked.wait(LIMIT_S)
    handover.offer("a")
    assert waiting.result(LIMIT_S) == "a"
