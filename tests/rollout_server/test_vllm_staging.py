"""The memory through which weights reach vLLM's workers, with a generator that loads as the test says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.engine import CacheKind, WeightStamp
from swift_stage2.rollout_server.staging import StagedWeights
from swift_stage2.rollout_server.vllm_engine import VllmRolloutEngine
from swift_stage2.servers.protocol import TensorSpec

WAIT_S = 20.0
WEIGHTS = {"a": torch.ones(4)}


class SlowGenerator:
    """Loads nothing; never ends a load while it is ``stuck``."""

    is_dead = False
    num_running = 0

    def __init__(self) -> None:
        self.stuck = False

    def manifest(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("a", (4,), "float32"),)

    async def load_weights(self, staged: StagedWeights, fault: str) -> list[dict[str, Any]]:
        if self.stuck:
            await asyncio.sleep(WAIT_S)
        return [{"read": {"a": "sum"}, "pieces": []}]

    async def reset_cache(self, kind: CacheKind) -> bool:
        return True

    def shut_down(self, timeout_s: float) -> None: ...


@pytest.fixture
def generator() -> SlowGenerator:
    return SlowGenerator()


@pytest.fixture
def engine(generator: SlowGenerator) -> Iterator[VllmRolloutEngine]:
    engine = VllmRolloutEngine(lambda: generator, model="none")  # type: ignore[arg-type, return-value]
    assert engine.wait_loaded(WAIT_S)
    yield engine
    engine.close(WAIT_S)


def num_memory_files() -> int:
    """How many memory files of weights this process holds open."""
    files = set()  # a mapping holds a second descriptor of its file
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "swift-stage2-weights" in os.readlink(entry):
                files.add(os.stat(entry).st_ino)
        except OSError:
            continue  # the one that lists
    return len(files)


def time_out(engine: VllmRolloutEngine, generator: SlowGenerator, times: int) -> None:
    generator.stuck = True
    for _ in range(times):
        with pytest.raises(RoundFailed, match="did not load within"):
            engine.install(WEIGHTS, WeightStamp(1, "run"), 0.1)
    generator.stuck = False


def test_memory_of_loads_that_timed_out_is_kept_until_one_succeeds(
    engine: VllmRolloutEngine, generator: SlowGenerator
) -> None:
    assert num_memory_files() == 1
    time_out(engine, generator, 3)
    assert num_memory_files() == 4  # a worker may still read each of them
    engine.install(WEIGHTS, WeightStamp(2, "run"), WAIT_S)
    assert num_memory_files() == 1
    assert engine.stamp == WeightStamp(2, "run")


def test_nothing_of_it_is_left_when_the_engine_is_closed(
    engine: VllmRolloutEngine, generator: SlowGenerator
) -> None:
    time_out(engine, generator, 1)
    engine.close(WAIT_S)
    assert num_memory_files() == 0
