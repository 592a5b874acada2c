from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from swift_stage2.errors import FenceShutDown
from swift_stage2.fence import InferFence

LONG_S = 60.0  # a deadline that no passing test reaches


class WatchedFence(InferFence):
    """Says when a thread has begun to wait, so that tests order threads without sleeping."""

    def __init__(self, version: int = 0, *, start_closed: bool = False) -> None:
        super().__init__(version, start_closed=start_closed)
        self.waiting = threading.Semaphore(0)
        wait = self._condition.wait

        def announced_wait(timeout: float | None = None) -> bool:
            self.waiting.release()
            return wait(timeout)

        self._condition.wait = announced_wait  # type: ignore[method-assign]

    def expect_waiter(self) -> None:
        assert self.waiting.acquire(timeout=LONG_S), "nobody began to wait"


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool.submit


@contextmanager
def post_in_flight(fence: InferFence) -> Iterator[Callable[[], None]]:
    """Hold a ticket; the yielded call ends the POST."""
    holder = fence.ticket(timeout_s=LONG_S)
    holder.__enter__()
    ended = threading.Event()

    def end() -> None:
        if not ended.is_set():
            ended.set()
            holder.__exit__(None, None, None)

    yield end
    end()


def version_of_next_ticket(fence: InferFence) -> int:
    with fence.ticket(timeout_s=LONG_S) as ticket:
        return ticket.version


def test_newcomers_wait_for_the_drain_and_get_the_new_version(background: Callable[..., Future[Any]]) -> None:
    fence = WatchedFence(version=1)
    with post_in_flight(fence) as end_post:
        assert fence.close() is False
        assert not fence.is_open
        newcomer = background(version_of_next_ticket, fence)
        fence.expect_waiter()
        end_post()
        assert fence.close() is True
        assert not newcomer.done()
        assert fence.in_flight == 0
    fence.reopen(2)
    assert newcomer.result(timeout=LONG_S) == 2


def test_a_fence_may_reopen_while_a_post_is_still_running() -> None:
    fence = InferFence(version=3)
    with post_in_flight(fence):
        assert not fence.close()
        fence.reopen(3)
        assert version_of_next_ticket(fence) == 3


def test_shutdown_wakes_every_waiter(background: Callable[..., Future[Any]]) -> None:
    fence = WatchedFence()
    with post_in_flight(fence):
        fence.close()
        asking = [background(version_of_next_ticket, fence) for _ in range(3)]
        for _ in asking:
            fence.expect_waiter()
        fence.shutdown()
        for asker in asking:
            with pytest.raises(FenceShutDown):
                asker.result(timeout=LONG_S)


def test_after_shutdown_nothing_opens_again() -> None:
    fence = InferFence()
    fence.shutdown()
    fence.shutdown()
    with pytest.raises(FenceShutDown):
        fence.ticket(timeout_s=LONG_S).__enter__()
    with pytest.raises(FenceShutDown):
        fence.reopen(1)
    assert fence.close() is True


@pytest.mark.parametrize("timeout_s", [None, -1.0, math.inf, math.nan])
def test_no_wait_without_a_deadline(timeout_s: Any) -> None:
    fence = InferFence()
    with pytest.raises(ValueError, match="finite deadline"):
        fence.ticket(timeout_s=timeout_s).__enter__()
    assert fence.is_open


def test_versions_only_grow() -> None:
    fence = InferFence(version=5)
    fence.close()
    with pytest.raises(ValueError, match="got version=4 after 5"):
        fence.reopen(4)
    assert not fence.is_open


def test_no_call_of_an_old_version_runs_inside_a_round(background: Callable[..., Future[Any]]) -> None:
    """Many pipelines against many rounds: what a ticket says is what the weights are, for as long as it is held."""
    fence = InferFence()
    weights = [0]
    num_rounds, stop = 60, threading.Event()
    mismatches: list[tuple[int, int]] = []

    def infer() -> int:
        calls = 0
        while True:
            with fence.ticket(timeout_s=LONG_S) as ticket:
                before = weights[0]
                calls += 1
                if not before == ticket.version == weights[0]:
                    mismatches.append((ticket.version, weights[0]))
            if stop.is_set():
                return calls

    pipelines = [background(infer) for _ in range(4)]
    for version in range(1, num_rounds + 1):
        while not fence.close():
            pass
        weights[0] = version
        fence.reopen(version)
        version_of_next_ticket(fence)
    stop.set()
    assert sum(pipeline.result(timeout=LONG_S) for pipeline in pipelines) > 0
    assert mismatches == []
