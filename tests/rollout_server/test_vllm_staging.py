"""The memory through which weights reach vLLM's workers, with a generator that loads as the test says."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from live_server import SharedFile
from waiting import wait_for

from swift_stage2.errors import EngineUnavailable, InstallFailed
from swift_stage2.rollout_server.engine import GenerationRequest, JobAborted, WeightStamp
from swift_stage2.rollout_server.vllm_engine import VllmRolloutEngine
from swift_stage2.rollout_server.vllm_weights import LoadRecord, Report
from swift_stage2.rollout_server.weight_source import WeightSource, open_learner_memory
from swift_stage2.servers.infer_wire import Completion
from swift_stage2.weights.snapshot import ReadSnapshot, SnapshotFile, WeightIdentity
from swift_stage2.wire import TensorSpec, WeightOffer, WeightWay

WAIT_S = 60.0
NOBODY_LEAVES = threading.Event()
LENT = "lent"
MANIFEST = (TensorSpec("a", (4,), "float32"),)


class SlowGenerator:
    """A worker that reads what it is given and loads nothing; never ends a load while it is ``stuck``."""

    is_dead = False
    keeps_requests = True
    num_running = 0
    scheduler = None

    def __init__(self) -> None:
        self.stuck = False
        self.aborts: list[str] = []
        self.read: list[list[float]] = []
        self.refusals = [""]  # why a worker could not read it
        self.told: list[str] = []

    def manifest(self) -> tuple[TensorSpec, ...]:
        return MANIFEST

    async def load_weights(self, path: str) -> list[str]:
        if self.stuck:
            await asyncio.sleep(WAIT_S)
        self.read.append(ReadSnapshot.open(path).tensors["a"].tolist())
        return self.refusals

    async def held_weights(self) -> list[Report]:
        return [LoadRecord().report("", {})]

    async def answer(
        self, request: GenerationRequest, name: str, is_aborted: Callable[[], bool]
    ) -> Completion:
        while self.aborts.count(name) < 3:
            await asyncio.sleep(0.001)
        raise JobAborted

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self.told.append("pause")
        try:
            yield
        finally:
            self.told.append("resume")

    async def name_weights(self, stamp: WeightStamp) -> None:
        self.told.append(str(stamp.version))

    async def abort(self, name: str) -> None:
        self.aborts.append(name)

    async def reset_caches(self) -> bool:
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
    """How many of the learners' files this process holds open."""
    files = set()  # a mapping holds a second descriptor of its file
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if f"swift-stage2-{LENT}" in os.readlink(entry):
                files.add(os.stat(entry).st_ino)
        except OSError:
            continue  # the one that lists
    return len(files)


def arrived(number: int = 1) -> WeightSource:
    """What a learner shares; only the server holds its file."""
    identity = WeightIdentity("run", number)
    snapshot = SnapshotFile(MANIFEST, bucket_bytes=1)
    snapshot.put([("a", torch.tensor([1.0, 2.0, 3.0, 4.0]))])
    snapshot.describe(identity)
    file = SharedFile(bytes(snapshot.file.memory), LENT)
    offer = WeightOffer("run", number, MANIFEST, WeightWay.SHARED_MEMORY, path=file.file.path)
    source = WeightSource(offer, open_learner_memory(file.file.path))
    file.close()
    return source


def install(
    engine: VllmRolloutEngine, source: WeightSource, stamp: WeightStamp, timeout_s: float = WAIT_S
) -> None:
    """A round's last part; afterwards nothing of the round is kept."""
    try:
        engine.install(source, stamp, timeout_s)
    finally:
        source.close()
        source.join(WAIT_S)


def test_workers_open_the_rounds_memory_and_nothing_of_it_is_left(
    engine: VllmRolloutEngine, generator: SlowGenerator
) -> None:
    install(engine, arrived(), WeightStamp(1, "run"))
    assert generator.read == [[1.0, 2.0, 3.0, 4.0]]
    assert generator.told == ["pause", "1", "resume"]
    assert engine.stamp == WeightStamp(1, "run")
    assert not engine.may_read
    wait_for(lambda: num_memory_files() == 0)


def test_memory_of_loads_that_timed_out_outlives_its_round_until_one_succeeds(
    engine: VllmRolloutEngine, generator: SlowGenerator
) -> None:
    generator.stuck = True
    for number in range(3):
        with pytest.raises(InstallFailed, match="did not answer within"):
            install(engine, arrived(number), WeightStamp(1, "run"), 0.1)
    wait_for(lambda: generator.told == ["pause", "1", "resume"] * 3)
    generator.stuck = False
    assert num_memory_files() == 3, "a worker may still open each of them"
    assert engine.may_read
    install(engine, arrived(4), WeightStamp(2, "run"))
    assert (engine.may_read, engine.stamp) == (False, WeightStamp(2, "run"))
    wait_for(lambda: num_memory_files() == 0)


@pytest.mark.parametrize("num_readers", [0, 1])
def test_workers_that_cannot_open_it_are_told_and_the_old_weights_are_whole_if_none_could(
    engine: VllmRolloutEngine, generator: SlowGenerator, num_readers: int
) -> None:
    generator.refusals = ["[Errno 13] Permission denied", *[""] * num_readers]
    with pytest.raises(InstallFailed, match=r"in 1 of .*Permission denied") as caught:
        install(engine, arrived(), WeightStamp(1, "run"))
    assert caught.value.torn == bool(num_readers)
    assert engine.stamp == (WeightStamp(1, "run") if num_readers else WeightStamp())
    assert generator.told == ["pause", *["1"] * num_readers, "resume"]


@pytest.mark.parametrize("closes", [False, True], ids=["its caller goes", "the server ends"])
def test_an_abort_is_repeated_until_vllm_has_heard_it(
    engine: VllmRolloutEngine, generator: SlowGenerator, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    stand_in = SimpleNamespace(EngineDeadError=ConnectionError, request_failure=lambda error: error)
    monkeypatch.setitem(sys.modules, "swift_stage2.rollout_server.vllm_generator", stand_in)
    spared, cut = engine.submit([GenerationRequest({})] * 2)
    wait_for(lambda: len(engine._held) == 2)
    assert engine.settle(0.1, NOBODY_LEAVES) == 2
    engine.close(WAIT_S) if closes else cut.abort()
    wait_for(cut.future.done)
    assert engine.settle(0.1, NOBODY_LEAVES) == (0 if closes else 1)
    assert isinstance(cut.future.exception(0), EngineUnavailable if closes else JobAborted)
    assert (spared.future.done(), len(set(generator.aborts))) == (closes, 0 if closes else 1)
