"""Work on threads that nobody waits for: its end and its failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_stage2.collectives import SingleRank
from swift_stage2.learner import Learner
from swift_stage2.runtime.background import BackgroundCall, BackgroundFailures

LONGEST_WAIT_S = 60.0


def test_it_returns_or_raises_what_the_work_did() -> None:
    assert BackgroundCall(lambda: 3, "counting").result_within(LONGEST_WAIT_S) == 3

    def fail() -> int:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        BackgroundCall(fail, "failing").result_within(LONGEST_WAIT_S)


def test_work_that_never_ends_is_left_behind_and_named() -> None:
    go_on = threading.Event()
    call = BackgroundCall(lambda: go_on.wait(LONGEST_WAIT_S), "waiting")
    assert not call.ended_within(0.0)
    with pytest.raises(RuntimeError, match="waiting did not end within"):
        call.result_within(0.01)
    go_on.set()
    assert call.ended_within(LONGEST_WAIT_S)
    assert call.result_within(0.0)


class Events:
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.log = SimpleNamespace(failure=None)

    def record_warning(self, message: str) -> None:
        self.warnings.append(message)

    def record_step(self, facts: object) -> None: ...


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundFailures]:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # pytest's would call it a failed test
    failures = BackgroundFailures()
    failures.watch()
    yield failures
    failures.stop()


def fail(*_: object) -> Any:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_dies_is_told_once_by_the_next_step(failures: BackgroundFailures) -> None:
    events = Events()
    learner = Learner(
        b_ratio=0.0,
        control=SingleRank(),
        events=events,  # type: ignore[arg-type]
        starvation=None,
        fail_when_starved=False,
        channel_b=None,
        failures=failures,
    )
    learner.start()
    for _ in range(2):
        thread = threading.Thread(target=fail, name="some-watch")
        thread.start()
        thread.join(LONGEST_WAIT_S)
    learner.begin_step(0, 1)
    learner.begin_step(1, 1)
    learner.close()
    assert events.warnings == [
        "the background thread 'some-watch' failed: RuntimeError: can't start new thread"
    ]


def test_pythons_hook_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    before = threading.excepthook
    failures = BackgroundFailures()
    failures.watch()
    failures.watch()
    thread = threading.Thread(target=fail, name="t")
    thread.start()
    thread.join(LONGEST_WAIT_S)
    failures.stop()
    failures.stop()
    assert threading.excepthook == before
    assert len(seen) == 1, "whoever listened before still hears of it"
    assert len(failures.take()) == 1
