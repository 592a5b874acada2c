"""The state that an engine's callers see, whatever happens to its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from swift_stage2.errors import EngineUnavailable, UserError
from swift_stage2.rollout_server.engine import (
    Engine,
    EngineState,
    GenerationJob,
    GenerationRequest,
)

WAIT_S = 60.0


class SmallEngine(Engine):
    """All that an engine needs; answers nothing."""

    name = "small"

    def __init__(self, load: Callable[[], None] = lambda: None, works: bool = True) -> None:
        super().__init__("model")
        self.may_end = threading.Event()
        self._load, self._works = load, works
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationJob]:
        self._require_ready()
        jobs = [GenerationJob(request) for request in requests]
        self._open.update(jobs)
        return jobs

    def install(self, *_: Any) -> Any: ...

    def _run(self) -> None:
        self._load()
        if self._works:
            self._become_ready()
            self.may_end.wait(WAIT_S)

    def _num_running(self) -> int:
        return 1

    def _hands_over(self, job: GenerationJob) -> bool:
        return False

    def _refuse_work(self) -> None:
        self.may_end.set()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close(WAIT_S)


def state_of(engine: Engine) -> tuple[EngineState, str]:
    status = engine.status()
    return status.state, status.detail


def request() -> GenerationRequest:
    return GenerationRequest({"messages": []})


def test_it_loads_becomes_ready_and_ends(engines: list[Engine]) -> None:
    may_load = threading.Event()
    engine = SmallEngine(lambda: assert_set(may_load))
    engines.append(engine)
    assert state_of(engine) == (EngineState.LOADING, "")
    with pytest.raises(EngineUnavailable, match="the engine is loading: ask again later"):
        engine.submit([request()])
    may_load.set()
    assert engine.wait_loaded(WAIT_S)
    assert state_of(engine) == (EngineState.READY, "")
    job, _ = engine.submit([request(), request()])
    assert (engine.status().num_running, engine.status().num_waiting) == (1, 1)
    engine.close(WAIT_S)
    assert state_of(engine) == (EngineState.CLOSED, "the server is shutting down")
    assert isinstance(job.future.exception(0), EngineUnavailable)
    with pytest.raises(EngineUnavailable, match="the engine is closed: the server is shutting down"):
        engine.submit([request()])


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_a_thread_that_ended_without_a_word_is_broken_and_nobody_waits_for_its_load() -> None:
    engine = SmallEngine(works=False)
    assert engine.wait_loaded(WAIT_S)
    engine._thread.join(WAIT_S)
    assert state_of(engine) == (EngineState.BROKEN, "the engine's thread has died")


@pytest.mark.parametrize(
    ("error", "told"),
    [(UserError("no such model"), "no such model"), (ValueError("odd"), "ValueError: odd")],
)
def test_what_broke_first_stays_told(error: Exception, told: str) -> None:
    def fail() -> None:
        raise error

    engine = SmallEngine(fail)
    assert engine.wait_loaded(WAIT_S)
    assert state_of(engine) == (EngineState.BROKEN, told)
    engine.close(WAIT_S)
    assert state_of(engine) == (EngineState.BROKEN, told)
