"""What a call on a thread of its own hands back, and that nobody waits for one that never ends."""

from __future__ import annotations

import threading

import pytest

from swift_stage2.process.background_call import BackgroundCall

LONGEST_WAIT_S = 20.0


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
