"""Weights as ms-swift's own client sends them, and one short real run of its asynchronous GRPO beside the stand-in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_server import free_port

from benchmarks.clocks import since
from benchmarks.learner_job import COMPLETIONS_PER_STEP, Arm, run_grpo
from benchmarks.peer import LearnerLoop
from benchmarks.servers import BenchServers, start_stand_in
from benchmarks.stand_in_server import StockWeights
from swift_stage2.collectives import GlooCommunicator
from swift_stage2.demo.scenes import SceneKind, write_scenes

LATENCY_S = 0.2
NUM_STEPS = 4
_JOIN_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def orphans_are_inits() -> Iterator[None]:
    """Benches adopt the orphans of what they start; of later tests' servers this process would reap none."""
    yield
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0, ctypes.get_errno()


@pytest.fixture
def weights() -> Iterator[StockWeights]:
    weights = StockWeights()
    yield weights
    weights.leave()


def _bucket(num_floats: int) -> list[dict[str, int]]:
    return [{"start_idx": 0, "end_idx": 4 * num_floats}]


def _join(port: int) -> GlooCommunicator:
    from vllm.distributed.utils import StatelessProcessGroup

    return GlooCommunicator(StatelessProcessGroup.create("127.0.0.1", port, rank=1, world_size=2))


def _send(communicator: GlooCommunicator, num_bytes: int, value: int) -> threading.Thread:
    def send() -> None:
        communicator.broadcast(torch.full((num_bytes,), value, dtype=torch.uint8), src=1)
        communicator.group.barrier()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_one_learner_after_another_pushes_over_the_same_port(weights: StockWeights) -> None:
    port = free_port()
    for value in (7, 9):
        weights.join(port)
        communicator = _join(port)
        for num_floats in (3, 5):
            weights.expect(_bucket(num_floats))
            sender = _send(communicator, 4 * num_floats, value)
            weights.load()
            sender.join(_JOIN_S)
            assert weights._buffer.tolist() == [value] * 4 * num_floats
        weights.leave()


def test_grpo_trains_beside_the_stand_in_and_its_clock_tells_waits_and_pushes(tmp_path: Path) -> None:
    rows = write_scenes(tmp_path, SceneKind.SHAPES, num_train=32, num_held_out=1, seed=0).train
    with BenchServers(tmp_path / "logs") as servers:
        ports = start_stand_in(servers, rows, LATENCY_S, stock=True)
        arm = Arm(name="peer", directory=tmp_path / "peer", rows=rows, num_steps=NUM_STEPS, ports=ports)
        clock = run_grpo(servers, arm, asynchronous=False)
    in_rollout, in_push = (since(clock, name, 1) for name in ("rollout_ns", "push_ns"))
    loop = LearnerLoop.of(
        clock,
        1,
        in_rollout=in_rollout,
        in_push=in_push,
        num_wanted=NUM_STEPS - 1,
        num_rollout_steps=NUM_STEPS - 1,
        num_completions=0,
        num_tokens=clock["tokens"][-1],
    )
    longest = 4 * 40  # tokens of an answer of four objects
    assert COMPLETIONS_PER_STEP * NUM_STEPS < loop.num_tokens < COMPLETIONS_PER_STEP * NUM_STEPS * longest
    # Inline, every step waits at least for the shortest wait that is drawn, and pushes weights once.
    assert loop.num_steps * LATENCY_S / 2 < in_rollout < loop.seconds
    assert 0 < in_push < loop.seconds
    assert loop.num_steps * LATENCY_S / 2 < loop.idle_share * loop.seconds < loop.seconds
