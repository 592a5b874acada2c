"""Activities add up to wall time, whoever switches and reads them; a trace holds what ended, on Unix time."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.telemetry.timing import Activity, ActivityClock, Trace


class Ticks:
    """A clock that stands still until it is moved."""

    def __init__(self, start_ns: int = 0) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns


moves = st.lists(st.tuples(st.sampled_from(Activity), st.integers(0, 10**13)), max_size=50)


@given(st.integers(0, 10**15), moves)
def test_closed_intervals_tile_the_time_line(start: int, steps: list[tuple[Activity, int]]) -> None:
    """In whatever way the totals are read meanwhile: no gap, no overlap, and the same sums as the totals."""
    ticks, closed = Ticks(start), list[tuple[str, int, int]]()
    clock = ActivityClock(ticks, lambda *interval: closed.append(interval))
    for activity, duration in steps:
        clock.switch(activity)
        ticks.now_ns += duration
        clock.state_dict()
    clock.end_interval()
    assert all(begin < end for _, begin, end in closed)
    edges = [edge for _, begin, end in closed for edge in (begin, end)]
    if closed:
        assert (edges[0], edges[-1]) == (start, ticks.now_ns)
        assert edges[1:-1:2] == edges[2::2], "each begins where the one before ended"
    for activity, total in clock.state_dict().items():
        assert sum(end - begin for name, begin, end in closed if name == activity) == total


def test_a_block_returns_to_the_outer_activity_also_when_it_raises() -> None:
    clock = ActivityClock(Ticks())
    clock.switch("busy")
    with clock.activity("syncing"):
        with pytest.raises(RuntimeError), clock.activity("waiting"):
            raise RuntimeError
        assert clock.current is Activity.SYNCING
    assert clock.current is Activity.BUSY


def test_off_it_records_nothing_and_makes_no_object(tmp_path: Path) -> None:
    trace = Trace(False)
    trace.record("b", 0, 1)
    assert trace.take() == ()
    assert trace.span("a") is trace.span("b")
    trace.save(tmp_path / "trace.json", 0)
    assert not list(tmp_path.iterdir())


def test_the_buffer_forgets_the_oldest_and_keeps_what_raised() -> None:
    trace = Trace(True, capacity=3)
    for number in range(4):
        trace.record(str(number), 0, 1)
    with pytest.raises(RuntimeError), trace.span("broken"):
        raise RuntimeError
    assert [span.name for span in trace.take()] == ["2", "3", "broken"]


def test_the_saved_trace_has_a_track_per_thread_and_unix_time(tmp_path: Path) -> None:
    trace = Trace(True)
    with trace.span("plan"):
        pass
    thread = threading.Thread(target=lambda: trace.record("rollout", 0, 5000), name="channel-b")
    thread.start()
    thread.join(10)
    trace.save(tmp_path / "trace" / "rank1.json", 1)
    events = json.loads((tmp_path / "trace" / "rank1.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert names[spans["rollout"]["tid"]] == "channel-b"
    assert spans["rollout"]["dur"] == 5.0
    assert spans["plan"]["tid"] != spans["rollout"]["tid"]
    assert {event["pid"] for event in events} == {1}
    assert abs(spans["plan"]["ts"] / 1e6 - time.time()) < 60
