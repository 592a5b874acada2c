"""One real server on port 0 with the real tiny model, shared by this directory's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import MODEL, LearnerRound, RunningServer, load_generator, load_learner, serve

from swift_stage2.rollout_server.transformers_engine import TransformersRolloutEngine, copy_weights

START_TIMEOUT_S = 240.0


@pytest.fixture(scope="session")
def loaded_engine() -> Iterator[TransformersRolloutEngine]:
    engine = TransformersRolloutEngine(load_generator, model=str(MODEL), max_batch_size=16)
    assert engine.wait_loaded(START_TIMEOUT_S)
    assert engine.status().state == "ready", engine.status().detail
    yield engine
    engine.close(timeout_s=10.0)


@pytest.fixture(scope="session")
def running_server(loaded_engine: TransformersRolloutEngine) -> Iterator[RunningServer]:
    with serve(loaded_engine) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoints_weights_again(running_server: RunningServer) -> Iterator[None]:
    """Other files' tests ask the shared server, too, and expect the checkpoint's answers."""
    yield
    LearnerRound(running_server, load_learner()).run()


@pytest.fixture
def server(running_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; a round that a test left open, or weights it left unproven, are cleared up."""
    yield running_server
    running_server.engine.copy = copy_weights
    if running_server.state() != "serving":
        LearnerRound(running_server, load_learner()).run()
