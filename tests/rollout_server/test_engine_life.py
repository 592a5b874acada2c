"""The state that an engine's callers see, whatever happens to its thread."""

from __future__ import annotations

import threading

import pytest

from swift_stage2.errors import EngineUnavailable
from swift_stage2.rollout_server.engine import EngineState
from swift_stage2.rollout_server.engine_life import EngineLife, require_ready

WAIT_S = 10.0


def test_it_loads_becomes_ready_and_ends() -> None:
    may_end = threading.Event()

    def run() -> None:
        life.become_ready()
        may_end.wait(WAIT_S)

    life = EngineLife(run)
    assert life.is_loading
    life.start()
    assert life.wait_loaded(WAIT_S)
    assert life.state == (EngineState.READY, "")
    life.end(EngineState.CLOSED, "the server is shutting down")
    may_end.set()
    life.join(WAIT_S)
    assert life.state == (EngineState.CLOSED, "the server is shutting down")


def test_a_thread_that_ended_without_a_word_is_broken_and_nobody_waits_for_its_load() -> None:
    life = EngineLife(lambda: None)
    life.start()
    assert life.wait_loaded(WAIT_S)
    life.join(WAIT_S)
    assert life.state == (EngineState.BROKEN, "the engine's thread has died")


def test_what_broke_first_stays_told() -> None:
    life = EngineLife(lambda: None)
    life.end(EngineState.BROKEN, "vLLM died")
    life.end(EngineState.CLOSED, "the server is shutting down")
    life.become_ready()
    assert life.state == (EngineState.BROKEN, "vLLM died")


def test_an_engine_that_was_closed_while_it_loaded_does_not_become_ready() -> None:
    life = EngineLife(lambda: None)
    life.end(EngineState.CLOSED, "the server is shutting down")
    life.become_ready()
    assert life.state[0] is EngineState.CLOSED


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.BROKEN, EngineState.CLOSED])
def test_only_a_ready_engine_takes_requests(state: EngineState) -> None:
    with pytest.raises(EngineUnavailable, match=f"the engine is {state}: why"):
        require_ready(state, "why")
    require_ready(EngineState.READY, "")
