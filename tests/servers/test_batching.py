from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.errors import EngineUnavailable
from swift_stage2.servers.batching import BatchQueue, ExclusiveTask

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Ask:
    key: Hashable
    number: int = 0


def make_queue(max_batch_size: int = 4, gather_s: float = 0.0) -> BatchQueue[Ask]:
    return BatchQueue(max_batch_size=max_batch_size, gather_s=gather_s)


def take_in_thread(queue: BatchQueue[Ask]) -> tuple[threading.Thread, list[Any]]:
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()), daemon=True)
    thread.start()
    return thread, taken


@given(keys=st.lists(st.sampled_from("abc"), max_size=20), size=st.integers(1, 6))
def test_batches_partition_the_jobs_in_order(keys: list[str], size: int) -> None:
    queue = make_queue(max_batch_size=size)
    for number, key in enumerate(keys):
        queue.put(Ask(key, number))
    batches: list[list[Ask]] = []
    while sum(map(len, batches)) < len(keys):
        batch = queue.take()
        assert isinstance(batch, list)
        assert len({ask.key for ask in batch}) == 1
        assert len(batch) <= size
        batches.append(batch)
    everything = [ask for batch in batches for ask in batch]
    assert sorted(ask.number for ask in everything) == list(range(len(keys)))
    for key in "abc":  # equal keys never overtake each other
        numbers = [ask.number for ask in everything if ask.key == key]
        assert numbers == sorted(numbers)
    for first, later in itertools.pairwise(batches):  # the oldest waiting job goes next
        assert first[0].number < later[0].number


def test_a_batch_waits_for_jobs_that_are_being_prepared() -> None:
    queue = BatchQueue[Ask](max_batch_size=4, gather_s=0.0, max_gather_s=DEADLINE_S)
    queue.expect(2)
    queue.put(Ask("a", 0), expected=True)
    thread, taken = take_in_thread(queue)
    assert taken == []
    queue.put(Ask("a", 1), expected=True)
    thread.join(DEADLINE_S)
    assert taken == [[Ask("a", 0), Ask("a", 1)]]


def test_a_task_leaves_alone_and_in_its_turn() -> None:
    queue = make_queue()
    queue.put(Ask("a", 0))
    queued = queue.put_task(lambda: "done")
    assert queue.take() == [Ask("a", 0)]
    task = queue.take()
    assert isinstance(task, ExclusiveTask)
    assert task is queued
    task.run()
    assert queued.future.result(timeout=0) == "done"


def test_closing_wakes_the_taker_and_refuses_what_comes_later() -> None:
    queue = make_queue()
    thread, taken = take_in_thread(queue)
    assert queue.close() == []
    thread.join(DEADLINE_S)
    assert taken == [None]
    for call in (lambda: queue.put(Ask("a")), lambda: queue.expect(1), lambda: queue.put_task(int)):
        with pytest.raises(EngineUnavailable):
            call()
