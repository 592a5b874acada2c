from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
from small_disk import SmallDisk

from swift_stage2.telemetry.timing import Trace


def test_a_block_that_raises_is_recorded() -> None:
    trace = Trace(True)
    with pytest.raises(RuntimeError), trace.span("broken"):
        raise RuntimeError
    assert [span.name for span in trace.spans] == ["broken"]


def test_off_it_records_nothing_and_makes_no_object(tmp_path: Path) -> None:
    trace = Trace(False)
    with trace.span("a"):
        trace.record("b", 0, 1)
    assert trace.spans == ()
    assert trace.span("a") is trace.span("b")
    trace.save(tmp_path / "trace.json", 0)
    assert not list(tmp_path.iterdir())


def test_the_buffer_forgets_the_oldest() -> None:
    trace = Trace(True, capacity=3)
    for number in range(5):
        with trace.span(str(number)):
            pass
    assert [span.name for span in trace.spans] == ["2", "3", "4"]


def test_the_saved_trace_has_a_track_per_thread(tmp_path: Path) -> None:
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


def test_clocks_of_ranks_are_aligned_through_unix_time() -> None:
    """Two ranks whose own clocks are an hour apart see one moment at the same place of the time line."""
    base = Trace(True)
    moment = base.now_ns()
    ahead = Trace(True, now_ns=lambda: base.now_ns() + 3600 * 10**9)
    base.record("here", moment, moment)
    ahead.record("here", moment + 3600 * 10**9, moment + 3600 * 10**9)
    (first,) = (e["ts"] for e in base.chrome_trace(0)["traceEvents"] if e["ph"] == "X")
    (second,) = (e["ts"] for e in ahead.chrome_trace(1)["traceEvents"] if e["ph"] == "X")
    assert abs(first - second) < 60e6, "the offsets were taken at most moments apart"


def test_a_full_disk_gives_one_warning(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    small_disk.fill()
    with caplog.at_level(logging.WARNING):
        Trace(True).save(small_disk.path / "rank0.json", 0)
    assert len(caplog.records) == 1
    assert not (small_disk.path / "rank0.json").exists()
