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
from swift_stage2.servers import batching
from swift_stage2.servers.batching import BatchQueue

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Ask:
    key: Hashable
    number: int = 0


def take_in_thread(queue: BatchQueue[Ask]) -> tuple[threading.Thread, list[Any]]:
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()), daemon=True)
    thread.start()
    return thread, taken


@given(keys=st.lists(st.sampled_from("abc"), max_size=20), size=st.integers(1, 6))
def test_batches_partition_the_jobs_in_order(keys: list[str], size: int) -> None:
    queue = BatchQueue[Ask](max_batch_size=size)
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


def test_a_batch_waits_for_jobs_that_are_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MOST_GATHER_S", DEADLINE_S)
    queue = BatchQueue[Ask](max_batch_size=4)
    queue.expect(2)
    queue.put(Ask("a", 0), expected=True)
    thread, taken = take_in_thread(queue)
    assert taken == []
    queue.put(Ask("a", 1), expected=True)
    thread.join(DEADLINE_S)
    assert taken == [[Ask("a", 0), Ask("a", 1)]]


def test_a_task_runs_before_the_next_batch_or_when_the_engine_asks() -> None:
    queue = BatchQueue[Ask](max_batch_size=4)
    queue.put(Ask("a", 0))
    first = queue.put_task(lambda: "done")
    assert queue.take() == [Ask("a", 0)]
    assert first.future.result(timeout=0) == "done"
    second, withdrawn = queue.put_task(lambda: "later"), queue.put_task(int)
    withdrawn.future.cancel()
    queue.run_tasks()
    assert second.future.result(timeout=0) == "later"
    alone = queue.put_task(int)
    assert queue.take() == []
    assert alone.future.done()


def test_closing_wakes_the_taker_and_refuses_what_comes_later() -> None:
    queue = BatchQueue[Ask](max_batch_size=4)
    thread, taken = take_in_thread(queue)
    queue.close()
    thread.join(DEADLINE_S)
    assert taken == [None]
    for call in (lambda: queue.put(Ask("a")), lambda: queue.expect(1), lambda: queue.put_task(int)):
        with pytest.raises(EngineUnavailable):
            call()
