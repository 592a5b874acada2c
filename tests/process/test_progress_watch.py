"""A thread that stays at one thing too long is told, with its stack; whoever goes on or idles is not."""

from __future__ import annotations

import logging
import threading

import pytest

from swift_stage2.process.progress_watch import ProgressWatch
from swift_stage2.process.standing import Standing
from swift_stage2.telemetry.activity import Activity, ActivityClock

LIMIT_S = 10.0


class Stalls:
    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []
        self.met = threading.Event()

    def __call__(self, what: str, seconds: float) -> None:
        self.told.append((what, seconds))
        self.met.set()


def test_the_same_thing_is_told_after_twice_the_time_again() -> None:
    stalls, standing = Stalls(), Standing("it waits", 100.0)
    watch = ProgressWatch({"it": lambda: standing}, limit_s=LIMIT_S, on_stall=stalls)
    for now_s in range(100, 160):
        watch.look(float(now_s))
    assert stalls.told == [("it waits", 10.0), ("it waits", 20.0), ("it waits", 40.0)]


def test_the_next_thing_has_the_whole_time_again() -> None:
    stalls, at = Stalls(), {"it": Standing("it waits", 100.0)}
    watch = ProgressWatch({"it": lambda: at["it"]}, limit_s=LIMIT_S, on_stall=stalls)
    watch.look(110.0)
    at["it"] = Standing("it waits", 111.0)
    watch.look(120.0)
    assert len(stalls.told) == 1
    watch.look(121.0)
    assert stalls.told[1:] == [("it waits", 10.0)]


def test_who_idles_is_not_told_and_does_not_hide_another() -> None:
    stalls = Stalls()
    who = {"idle": lambda: None, "it": lambda: Standing("it waits", 0.0)}
    ProgressWatch(who, limit_s=LIMIT_S, on_stall=stalls).look(1000.0)
    assert stalls.told == [("it waits", 1000.0)]


def test_the_log_holds_the_stack_of_the_thread_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    stalls, release = Stalls(), threading.Event()

    def wait_for_what_never_comes() -> None:
        release.wait(60)

    thread = threading.Thread(target=wait_for_what_never_comes, name="the-one-that-hangs")
    thread.start()
    watch = ProgressWatch(
        {"it": lambda: Standing("it waits", 0.0)}, limit_s=0.0, on_stall=stalls, tick_s=0.01
    )
    try:
        with caplog.at_level(logging.ERROR):
            watch.start()
            assert stalls.met.wait(30)
    finally:
        watch.stop()
        release.set()
        thread.join(30)
    assert not watch._thread.is_alive()
    text = caplog.messages[0]
    assert text.startswith("no progress: it waits for ")
    assert "thread the-one-that-hangs:" in text
    assert "in wait_for_what_never_comes" in text


def test_a_watch_that_never_started_stops() -> None:
    ProgressWatch({}, limit_s=LIMIT_S, on_stall=Stalls()).stop()


@pytest.mark.parametrize("activity", list(Activity))
def test_the_main_thread_stands_at_its_activity_unless_that_may_last(activity: Activity) -> None:
    clock = ActivityClock()
    assert clock.standing is None
    clock.switch(activity)
    first = clock.standing
    clock.totals_ns()
    assert clock.standing is first, "looking is no progress"
    if activity in (Activity.EVALUATING, Activity.OTHER):
        assert first is None
        return
    assert first is not None
    assert first.what == f"the main thread is {activity}"
    clock.switch(activity)
    assert clock.standing is not first
