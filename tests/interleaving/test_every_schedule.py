"""Fence and reservation under every schedule, or where these are too many, every one with three preemptions at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from interleaving.exhaustive import run_all
from interleaving.mutations import CountingQueue, LateFence
from interleaving.scene import virtual_world
from interleaving.scheduler import Violation
from interleaving.tiny_scenes import fence_scene, reservation_scene, shutdown_scene

from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.fence import InferFence

Work = Callable[[], None]


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    with virtual_world():
        yield


@pytest.mark.parametrize(
    ("num_posters", "num_rounds", "max_preemptions", "at_least"),
    [
        (1, 1, None, 500),
        pytest.param(1, 2, None, 30_000, marks=pytest.mark.slow),
        (2, 1, 3, 10_000),
        pytest.param(2, 2, 3, 49_000, marks=pytest.mark.slow),
    ],
)
def test_nothing_runs_during_a_push_and_tickets_say_what_computed(
    num_posters: int, num_rounds: int, max_preemptions: int | None, at_least: int
) -> None:
    def make() -> Work:
        return fence_scene(InferFence, num_posters, num_rounds)

    assert run_all(make, max_preemptions=max_preemptions) >= at_least


def test_a_shutdown_leaves_no_waiter_behind() -> None:
    assert run_all(lambda: shutdown_scene(1)) >= 150
    assert run_all(lambda: shutdown_scene(2), max_preemptions=3) >= 9_000


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(
    ("num_producers", "num_offers", "max_preemptions", "at_least"), [(1, 3, None, 1_000), (2, 2, 3, 5_000)]
)
def test_a_reservation_is_never_taken_back_and_every_pack_accounted_for(
    releases: bool, num_producers: int, num_offers: int, max_preemptions: int | None, at_least: int
) -> None:
    def make() -> Work:
        return reservation_scene(
            ReadyQueue, releases=releases, num_producers=num_producers, num_offers=num_offers
        )

    assert run_all(make, max_preemptions=max_preemptions) >= at_least


def test_a_version_raised_after_the_door_has_reopened_is_found() -> None:
    with pytest.raises(Violation, match="a ticket says version 0, computed with 1"):
        run_all(lambda: fence_scene(LateFence, 1, 1))


def test_packs_that_are_counted_and_not_taken_are_found() -> None:
    with pytest.raises(Violation, match="a reserved pack is dropped"):
        run_all(
            lambda: reservation_scene(
                CountingQueue,  # type: ignore[arg-type]
                releases=False,
                num_producers=1,
                num_offers=1,
            )
        )
