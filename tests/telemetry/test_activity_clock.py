from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.telemetry.timing import Activity, ActivityClock, IntervalClock, PipelineActivity


class Ticks:
    """A clock that stands still until it is moved."""

    def __init__(self, start_ns: int = 0) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns


activities = st.sampled_from(list(Activity))
moves = st.lists(st.tuples(activities, st.integers(0, 10**13)), max_size=50)


@dataclass(frozen=True)
class Block:
    """One activity and the blocks inside it."""

    activity: Activity
    inner: tuple[Block, ...] = ()


blocks = st.recursive(
    st.builds(Block, activities),
    lambda inner: st.builds(Block, activities, st.lists(inner, max_size=3).map(tuple)),
    max_leaves=12,
)


@given(blocks)
def test_nested_blocks_return_to_the_outer_activity(tree: Block) -> None:
    ticks = Ticks()
    clock = ActivityClock(ticks)
    expected = dict.fromkeys(Activity, 0)

    def run(block: Block, outer: Activity) -> None:
        with clock.activity(block.activity):
            ticks.now_ns += 1
            expected[block.activity] += 1
            for child in block.inner:
                run(child, block.activity)
        assert clock.current is outer
        ticks.now_ns += 10
        expected[outer] += 10

    run(tree, Activity.STARTING)
    assert clock.totals_ns() == expected


@given(st.integers(0, 10**15), moves)
def test_closed_intervals_tile_the_time_line(start: int, steps: list[tuple[Activity, int]]) -> None:
    """In whatever way the totals are read meanwhile: no gap, no overlap, and the same sums as the totals."""
    ticks, closed = Ticks(start), list[tuple[str, int, int]]()
    clock = ActivityClock(ticks, lambda *interval: closed.append(interval))
    for activity, duration in steps:
        clock.switch(activity)
        ticks.now_ns += duration
        clock.totals_ns()
    clock.end_interval()
    assert all(begin < end for _, begin, end in closed)
    edges = [edge for _, begin, end in closed for edge in (begin, end)]
    if closed:
        assert (edges[0], edges[-1]) == (start, ticks.now_ns)
        assert edges[1:-1:2] == edges[2::2], "each begins where the one before ended"
    for activity, total in clock.totals_ns().items():
        assert sum(end - begin for name, begin, end in closed if name == activity) == total


def test_totals_and_wall_time_are_of_one_moment_whoever_switches() -> None:
    clock = IntervalClock(PipelineActivity.IDLE)
    ended = threading.Event()

    def lane() -> None:
        while not ended.is_set():
            clock.switch_from(PipelineActivity.IDLE, PipelineActivity.ASKING)
            clock.switch_from(PipelineActivity.ASKING, PipelineActivity.IDLE)

    thread = threading.Thread(target=lane)
    thread.start()
    readings = [clock.read_ns() for _ in range(2000)]
    ended.set()
    thread.join(10)
    assert all(sum(totals.values()) == wall for totals, wall in readings)


def test_a_block_that_raises_returns_too() -> None:
    clock = ActivityClock(Ticks())
    clock.switch("busy")
    with pytest.raises(RuntimeError), clock.activity("syncing"):
        raise RuntimeError
    assert clock.current is Activity.BUSY
