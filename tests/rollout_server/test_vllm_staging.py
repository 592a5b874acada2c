"""The memory through which weights reach vLLM's workers, with a generator that loads as the test says."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import SharedFile

from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.engine import CacheKind, WeightStamp
from swift_stage2.rollout_server.mapped_snapshot import MappedSnapshot
from swift_stage2.rollout_server.staging import StagedWeights, open_staged
from swift_stage2.rollout_server.vllm_engine import VllmRolloutEngine
from swift_stage2.rollout_server.weight_receiver import Bucket, BucketEntry, ReceivedWeights
from swift_stage2.wire import TensorSpec

WAIT_S = 60.0
WEIGHTS = {"a": torch.ones(4)}
LENT = "swift-stage2-lent"


class SlowGenerator:
    """A worker that reads what it is given and loads nothing; never ends a load while it is ``stuck``."""

    is_dead = False
    num_running = 0

    def __init__(self) -> None:
        self.stuck = False
        self.read: list[list[float]] = []
        self.unreadable: list[str | None] = [None]  # why, of each worker

    def manifest(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("a", (4,), "float32"),)

    async def load_weights(self, staged: StagedWeights, fault: str) -> list[dict[str, Any]]:
        if self.stuck:
            await asyncio.sleep(WAIT_S)
        self.read.append(open_staged(staged.path, staged.num_bytes, staged.layout)["a"].tolist())
        report = {"read": {"a": "sum"}, "pieces": []}
        return [report if why is None else {"unreadable": why} for why in self.unreadable]

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


def num_memory_files(name: str = "swift-stage2-weights") -> int:
    """How many memory files of that name this process holds open."""
    files = set()  # a mapping holds a second descriptor of its file
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if name in os.readlink(entry):
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


@pytest.fixture
def mapped() -> ReceivedWeights:
    """What a learner shares; only the server's mapping holds its file."""
    file = SharedFile(torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes(), LENT)
    snapshot = MappedSnapshot(file.offer)
    file.close()
    snapshot.expect(Bucket.from_entries([BucketEntry(TensorSpec("a", (4,), "float32"), 0, 16)], 0))
    return snapshot.collect(WAIT_S, threading.Event())


def end_round(mapped: ReceivedWeights) -> None:
    assert mapped.snapshot is not None
    mapped.snapshot.close()
    mapped.snapshot.join(WAIT_S)
    mapped.tensors.clear()


def test_workers_open_the_learners_memory_and_nothing_of_it_is_left(
    engine: VllmRolloutEngine, generator: SlowGenerator, mapped: ReceivedWeights
) -> None:
    engine.install(mapped.tensors, WeightStamp(1, "run", "run-1"), WAIT_S, None, mapped.snapshot)
    assert generator.read == [[1.0, 2.0, 3.0, 4.0]]
    assert engine.stamp == WeightStamp(1, "run", "run-1")
    end_round(mapped)
    assert num_memory_files(LENT) == 0


def test_memory_that_a_worker_may_still_open_outlives_its_round_and_its_learner(
    engine: VllmRolloutEngine, generator: SlowGenerator, mapped: ReceivedWeights
) -> None:
    own = engine.staging
    generator.stuck = True
    with pytest.raises(RoundFailed, match="did not load within"):
        engine.install(mapped.tensors, WeightStamp(1, "run"), 0.1, None, mapped.snapshot)
    generator.stuck = False
    end_round(mapped)
    assert num_memory_files(LENT) == 1
    assert engine.staging is own, "no worker reads the server's own"
    engine.install(WEIGHTS, WeightStamp(2, "run"), WAIT_S)
    assert num_memory_files(LENT) == 0


@pytest.mark.parametrize("num_readers", [0, 1])
def test_workers_that_cannot_open_it_are_told_and_the_old_weights_are_whole_if_none_could(
    engine: VllmRolloutEngine, generator: SlowGenerator, mapped: ReceivedWeights, num_readers: int
) -> None:
    generator.unreadable = ["[Errno 13] Permission denied", *[None] * num_readers]
    with pytest.raises(RoundFailed, match="Permission denied in 1 of") as caught:
        engine.install(mapped.tensors, WeightStamp(1, "run"), WAIT_S, None, mapped.snapshot)
    assert caught.value.torn == bool(num_readers)
    assert engine.stamp == WeightStamp()
    end_round(mapped)
