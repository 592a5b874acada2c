"""The state that an engine's callers see, whatever happens to its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from swift_stage2.errors import EngineUnavailable, UserError
from swift_stage2.rollout_server.engine import (
    AWAKE,
    Engine,
    EngineState,
    GenerationJob,
    GenerationRequest,
    SleepMode,
)

WAIT_S = 60.0


class SmallEngine(Engine):
    """All that an engine needs; answers nothing."""

    name = "small"

    def __init__(
        self, load: Callable[[], None] = lambda: None, works: bool = True, mode: SleepMode = AWAKE
    ) -> None:
        super().__init__("model", mode)
        self.asleep: Future[None] = Future()
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

    def _fall_asleep(self) -> Future[None]:
        return self.asleep

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


def test_an_engine_that_waits_to_be_asked_holds_nothing_until_then(engines: list[Engine]) -> None:
    loads, may_load = threading.Event(), threading.Event()

    def load() -> None:
        loads.set()
        assert_set(may_load)

    engine, ended = (SmallEngine(load, mode=SleepMode(2, loads_when_asked=True)) for _ in range(2))
    engines.append(engine)
    engine.sleep(WAIT_S)  # as it does already
    assert (state_of(engine), engine.is_asleep) == ((EngineState.UNLOADED, ""), True)
    ended.close(WAIT_S)
    ended._thread.join(WAIT_S)
    assert not ended._thread.is_alive()
    assert not loads.is_set()
    with pytest.raises(EngineUnavailable, match="the engine is loading"):
        engine.load_now(0.01)
    with pytest.raises(EngineUnavailable, match="the engine is loading"):
        engine.sleep(0.01)  # it takes memory already
    with ThreadPoolExecutor(1) as callers:
        asked = callers.submit(engine.load_now, WAIT_S)
        may_load.set()
        asked.result(WAIT_S)
    assert state_of(engine) == (EngineState.READY, "")


@pytest.mark.parametrize(
    ("error", "told"), [(None, "TimeoutError$"), (AssertionError("Memory increased"), "Memory increased")]
)
def test_an_engine_that_does_not_fall_asleep_says_why_and_is_not_believed(
    engines: list[Engine], error: Exception | None, told: str
) -> None:
    engine = SmallEngine()
    engines.append(engine)
    assert engine.wait_loaded(WAIT_S)
    (job,) = engine.submit([request()])
    if error is not None:
        engine.asleep.set_exception(error)
    with pytest.raises(EngineUnavailable, match=f"the engine did not sleep: .*{told}"):
        engine.sleep(0.01)
    assert isinstance(job.future.exception(0), EngineUnavailable)
    assert engine.asleep.cancelled() is (error is None)
    assert not engine.is_asleep
