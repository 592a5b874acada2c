from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from swift_stage2.errors import FenceShutDown
from swift_stage2.fence import InferFence

LONG_S = 60.0  # a deadline that no passing test reaches


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool.submit


def opened_at(version: int) -> InferFence:
    fence = InferFence()
    fence.reopen(version)
    return fence


def test_nobody_enters_while_it_drains_and_newcomers_get_the_new_version() -> None:
    fence, told = opened_at(1), list[bool]()
    fence.on_change = lambda: told.append(fence.is_open)
    ticket = fence.enter()
    assert ticket is not None
    assert fence.close() is False
    assert (fence.is_open, fence.enter(), fence.in_flight) == (False, None, 1)
    fence.leave()
    assert fence.close() is True
    assert told == []
    fence.reopen(2)
    newcomer = fence.enter()
    assert newcomer is not None
    assert (ticket.version, newcomer.version, told) == (1, 2, [True])


def test_a_fence_may_reopen_while_a_post_is_still_running() -> None:
    fence = opened_at(3)
    fence.enter()
    assert not fence.close()
    fence.reopen(3)
    assert fence.enter() is not None
    assert fence.in_flight == 2


def test_after_shutdown_nothing_opens_again_and_who_waits_is_told() -> None:
    fence, told = InferFence(), list[bool]()
    fence.on_change = lambda: told.append(True)
    fence.shutdown()
    fence.shutdown()
    assert told
    with pytest.raises(FenceShutDown):
        fence.enter()
    with pytest.raises(FenceShutDown):
        fence.reopen(1)
    assert fence.close() is True


def test_versions_only_grow() -> None:
    fence = opened_at(5)
    fence.close()
    with pytest.raises(ValueError, match="got version=4 after 5"):
        fence.reopen(4)
    assert not fence.is_open


def test_no_call_of_an_old_version_runs_inside_a_round(background: Callable[..., Future[Any]]) -> None:
    """Many pipelines against many rounds: what a ticket says is what the weights are, for as long as it is held."""
    fence, opened = opened_at(0), threading.Event()
    fence.on_change = opened.set
    weights, num_rounds, stop = [0], 60, threading.Event()
    mismatches: list[tuple[int, int]] = []

    def infer() -> int:
        calls = 0
        while not (stop.is_set() and calls):
            if (ticket := fence.enter()) is None:
                opened.clear()
                if not fence.is_open:
                    assert opened.wait(LONG_S)
                continue
            before = weights[0]
            calls += 1
            if not before == ticket.version == weights[0]:
                mismatches.append((ticket.version, weights[0]))
            fence.leave()
        return calls

    pipelines = [background(infer) for _ in range(4)]
    for version in range(1, num_rounds + 1):
        while not fence.close():
            pass
        weights[0] = version
        fence.reopen(version)
        while (ticket := fence.enter()) is None:
            pass
        assert ticket.version == version
        fence.leave()
    stop.set()
    assert all(pipeline.result(timeout=LONG_S) for pipeline in pipelines)
    assert mismatches == []
