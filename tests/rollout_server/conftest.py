"""One real server on port 0 with the real tiny model, shared by this directory's tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from live_server import CALL_TIMEOUT_S, MODEL, LearnerRound, RunningServer, load_generator, load_learner

from swift_stage2.rollout_server.app import RolloutServer, bind
from swift_stage2.rollout_server.service import RolloutService
from swift_stage2.rollout_server.transformers_engine import InstallFault, TransformersRolloutEngine

START_TIMEOUT_S = 90.0


@pytest.fixture(scope="session")
def loaded_engine() -> Iterator[TransformersRolloutEngine]:
    engine = TransformersRolloutEngine(load_generator, model=str(MODEL), max_batch_size=16)
    assert engine.wait_loaded(START_TIMEOUT_S)
    assert engine.status().state == "ready", engine.status().detail
    yield engine
    engine.close(timeout_s=10.0)


@pytest.fixture(scope="session")
def running_server(loaded_engine: TransformersRolloutEngine) -> Iterator[RunningServer]:
    service = RolloutService(loaded_engine)
    listener = bind("127.0.0.1", 0)
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    uvicorn_server = RolloutServer(service, api_key=None)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with httpx.Client(base_url=base_url, timeout=CALL_TIMEOUT_S, trust_env=False) as http:
        yield RunningServer(loaded_engine, service, http, base_url)
    uvicorn_server.should_exit = True
    thread.join(15.0)
    assert not thread.is_alive()


@pytest.fixture
def server(running_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; a round that a test left open, or weights it left unproven, are cleared up."""
    yield running_server
    running_server.engine.install_fault = InstallFault.NONE
    if running_server.state() != "serving":
        LearnerRound(running_server, load_learner()).run()
