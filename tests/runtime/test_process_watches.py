"""A rank that is stuck inside a sync round ends within a stated time."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from two_rank_hang import TIMEOUT_S
from two_ranks import run_ranks

from swift_stage2.runtime import background
from swift_stage2.runtime.background import EXIT_HANG, RoundWatch

PATIENCE_S = 60.0
_PROGRAM = Path(__file__).parents[1].joinpath("two_rank_hang.py")


def end_of_both(scenario: str) -> list[str]:
    """Returns what both ranks wrote; the store is here, as torchrun's is in its agent. Both must end with status 70."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    return run_ranks(_PROGRAM, scenario, status=EXIT_HANG, PORT=str(store.port))[1]


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("gather", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("canary", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_inside_a_gather_ends_both_with_its_cause(scenario: str) -> None:
    first, second = end_of_both(scenario)
    assert "rank 1:" in first
    assert "RuntimeError: no memory" in first
    assert "RuntimeError: no memory" in second
    assert "thread MainThread" in first
    assert "all_reduce" in first, "the stack shows where rank 0 was stuck"


@pytest.mark.slow
def test_a_main_thread_that_blocks_for_ever_ends_both_with_the_cause() -> None:
    first, second = end_of_both("main_thread")
    cause = f"rank 0: the snapshot of weights did not end within {TIMEOUT_S + 1.0:g} s"
    assert cause in first
    assert "ours.recv(1)" in first
    assert f"raised: {cause}" in second


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(background, "_TICK_S", 0.01)
    return []


def watch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "round-watch"]


def test_what_ends_in_time_or_raises_is_not_watched_any_more(left: list[int]) -> None:
    def fail() -> None:
        with RoundWatch(PATIENCE_S, str, left.append) as watch:
            watch.begin("the canary")
            watch.begin("the transfer")
            running.extend(watch_threads())
            raise ValueError("not finite")

    running: list[threading.Thread] = []
    with pytest.raises(ValueError, match="not finite"):
        fail()
    assert running
    for thread in running:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert left == []


def test_a_watch_can_serve_the_next_round(left: list[int], caplog: pytest.LogCaptureFixture) -> None:
    is_left = threading.Event()
    watch = RoundWatch(
        0.05, lambda hang: f"{hang}: no memory", lambda status: (left.append(status), is_left.set())
    )
    with watch:
        watch.begin("the canary")
    with watch:
        watch.begin("the transfer")
        assert is_left.wait(PATIENCE_S)
    assert left == [EXIT_HANG]
    assert "the transfer did not end within 0.05 s: no memory" in caplog.text
    assert "thread MainThread" in caplog.text


def test_last_words_that_cannot_be_said_delay_the_end_no_longer_than_their_limit(
    left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LAST_WORDS_S", 0.05)
    is_left, let_go = threading.Event(), threading.Event()
    try:
        with RoundWatch(
            0.05, lambda hang: str(let_go.wait(PATIENCE_S)), lambda status: is_left.set()
        ) as watch:
            watch.begin("the transfer")
            assert is_left.wait(PATIENCE_S)
    finally:
        let_go.set()


class NeverEnded(threading.Event):
    """Returns at once, as after a process was stopped for hours: only the number of waits counts."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return False


def test_a_stopped_process_has_not_spent_its_time() -> None:
    left: list[int] = []
    ended = NeverEnded()
    RoundWatch(30.0, str, left.append)._run("the transfer", ended, lambda: False)
    assert (ended.num_waits, left) == (60, [EXIT_HANG])


def test_a_watch_beside_training_ends_when_what_it_watches_is_over() -> None:
    left: list[int] = []
    asked = threading.Event()
    watch = RoundWatch(PATIENCE_S, str, left.append)
    watch.begin("the transfer", lambda: (asked.set(), True)[1])
    (thread,) = (each for each in threading.enumerate() if each.name == "round-watch")
    thread.join(PATIENCE_S / 2)
    assert asked.is_set()
    assert not thread.is_alive()
    assert left == []
