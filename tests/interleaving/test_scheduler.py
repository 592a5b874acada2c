"""The harness itself: it finds what it is made for, and one seed is one schedule."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_python
from interleaving.exhaustive import run_all
from interleaving.scene import run_seed, virtual_world
from interleaving.scheduler import Scheduler, Violation, seeded_chooser
from interleaving.virtual_threading import Event, Lock, active, running


def run(work: Callable[[], None], seed: int = 0) -> Scheduler:
    scheduler = Scheduler(seeded_chooser(random.Random(seed)), horizon_s=100.0)
    with running(scheduler):
        scheduler.run(work)
    return scheduler


def test_locks_taken_in_opposite_order_are_found_and_both_stacks_are_shown() -> None:
    def work() -> None:
        first, second = Lock(), Lock()

        def take(outer: Lock, inner: Lock) -> None:
            with outer, inner:
                pass

        active().spawn(lambda: take(first, second), "one")
        active().spawn(lambda: take(second, first), "two")

    with pytest.raises(Violation, match="deadlock: nobody can run") as raised:
        run_all(lambda: work)
    assert "one: waits, last at acquire" in str(raised.value)
    assert "two: waits, last at acquire" in str(raised.value)


def test_a_lost_update_is_found() -> None:
    def work() -> None:
        total = [0]

        def add() -> None:
            before = total[0]
            active().point("between")
            total[0] = before + 1
            if total[0] != 2 and len(ended) == 1:
                active().fail("an update is lost")
            ended.append(1)

        ended: list[int] = []
        active().spawn(add, "one")
        active().spawn(add, "two")

    with pytest.raises(Violation, match="an update is lost"):
        run_all(lambda: work)


def test_a_wait_that_nobody_ends_is_found() -> None:
    def wait() -> None:
        Event().wait()

    with pytest.raises(Violation, match="deadlock"):
        run(wait)

    def poll() -> None:
        event = Event()
        while not event.wait(1.0):
            pass

    with pytest.raises(Violation, match="somebody waits for ever"):
        run(poll)


def test_a_loop_that_no_time_passes_in_is_found() -> None:
    def spin() -> None:
        while True:
            active().point("spins")

    with pytest.raises(Violation, match="somebody spins"):
        run(spin)


def test_every_schedule_is_run_once() -> None:
    """Two strands of three steps each interleave in 6! / (3! 3!) ways."""
    seen = []

    def work() -> None:
        order: list[int] = []
        seen.append(order)

        def walk(who: int) -> None:
            for step in range(3):
                order.append(who)
                if step < 2:
                    active().point("a step")

        active().spawn(lambda: walk(0), "0")
        active().spawn(lambda: walk(1), "1")

    assert run_all(lambda: work) == len({tuple(order) for order in seen}) == 20


def digest(seed: int, *, traced: bool) -> tuple[int, float, list[tuple[str, int]]]:
    with virtual_world():
        counts, scheduler = run_seed(seed, traced=traced)
    return scheduler.num_points, scheduler.now, sorted(counts.items())


@pytest.mark.slow
def test_a_seed_is_one_schedule_traced_or_not_in_any_process() -> None:
    seeds = range(40, 60)
    program = "from interleaving.test_scheduler import digest\n" + "".join(
        f"print(digest({seed}, traced=False))\n" for seed in seeds
    )
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    other = run_python("-c", program, variables={"PYTHONPATH": path, "PYTHONHASHSEED": "4711"}, check=True)
    mine = [digest(seed, traced=True) for seed in seeds]
    assert other.stdout.splitlines() == [str(entry) for entry in mine]
