"""Stage *handover*: figures for weights that leave the learner while it trains, and reach another process by memory.

A snapshot into pinned memory on a side stream beside backward passes; a memory file that a second process maps; on a
GPU also CUDA IPC. Both times the second process, this module as a program, tells the checksum of what it sees.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import subprocess
import sys
from base64 import b64decode, b64encode
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from benchmarks.gpu_check.measuring import synchronise, timed
from benchmarks.gpu_check.stage import Context
from swift_stage2.errors import CheckFailed
from swift_stage2.weights.checksum import checksum_tensor

_BYTES = 1 << 30
_REHEARSED_BYTES = 1 << 20
_WIDTH = 8192
_REHEARSED_WIDTH = 128
_NUM_PASSES = 20
_READER_S = 60.0
_GIB = 1 << 30


def run(context: Context) -> None:
    """Raises ``CheckFailed`` where what arrived is not what was sent."""
    num_bytes = _REHEARSED_BYTES if context.rehearsal else _BYTES
    generator = torch.Generator(context.device).manual_seed(0)
    weights = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, device=context.device, generator=generator
    )
    expected = checksum_tensor(weights)
    snapshot = _snapshot_beside_training(context, weights)
    if checksum_tensor(snapshot) != expected:
        raise CheckFailed("a snapshot taken beside training must hold the weights, it does not")
    _through_memory_file(context, snapshot, expected)
    if context.rehearsal:
        context.figures.note("cuda_ipc", "left out: the rehearsal has no GPU")
    else:
        _through_cuda_ipc(context, weights, expected)


def _snapshot_beside_training(context: Context, weights: torch.Tensor) -> torch.Tensor:
    note, device = context.figures.note, context.device
    host = torch.empty(weights.shape, dtype=torch.uint8, pin_memory=device != "cpu")
    host.fill_(0)  # touched before anything is measured
    host_gib = weights.numel() / _GIB
    _, alone_s = timed(device, lambda: host.copy_(weights, non_blocking=True))
    note("snapshot_alone_gib_per_s", host_gib / alone_s)
    width = _REHEARSED_WIDTH if context.rehearsal else _WIDTH
    layer = torch.nn.Linear(width, width, device=device, dtype=getattr(torch, context.dtype))
    batch = torch.ones(width, width, device=device, dtype=layer.weight.dtype)

    def train() -> None:
        for _ in range(_NUM_PASSES):
            layer(batch).sum().backward()

    train()
    _, bare_s = timed(device, train)
    host.fill_(0)

    def train_and_copy() -> None:
        if device == "cpu":
            host.copy_(weights)
            train()
            return
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            host.copy_(weights, non_blocking=True)
        train()

    _, both_s = timed(device, train_and_copy)
    note("backward_passes_s", bare_s)
    note("backward_passes_with_snapshot_s", both_s)
    return host


def _through_memory_file(context: Context, snapshot: torch.Tensor, expected: str) -> None:
    descriptor = os.memfd_create("gpu-check")
    try:
        os.posix_fallocate(descriptor, 0, snapshot.numel())
        file = torch.frombuffer(mmap.mmap(descriptor, snapshot.numel()), dtype=torch.uint8)
        file.fill_(0)  # touched before anything is measured
        _, seconds = timed("cpu", partial(file.copy_, snapshot))
        context.figures.note("memory_file_write_gib_per_s", snapshot.numel() / _GIB / seconds)
        seen = _read_elsewhere({"descriptor": descriptor, "num_bytes": snapshot.numel()}, descriptor)
    finally:
        os.close(descriptor)
    _note_what_was_seen(context, "memory_file", seen, expected)


def _through_cuda_ipc(context: Context, weights: torch.Tensor, expected: str) -> None:
    # This pickler sends a handle instead of bytes: torch taught it so.
    handle = b64encode(bytes(ForkingPickler.dumps(weights))).decode()
    synchronise(context.device)
    _note_what_was_seen(context, "cuda_ipc", _read_elsewhere({"handle": handle}), expected)


def _note_what_was_seen(context: Context, name: str, seen: dict[str, Any], expected: str) -> None:
    context.figures.note(f"{name}_open_s", seen["open_s"])
    context.figures.note(f"{name}_sum_s", seen["sum_s"])
    if seen["checksum"] != expected:
        raise CheckFailed(f"{name}: the other process must see the same bytes, it does not")


def _read_elsewhere(where: dict[str, Any], *descriptors: int) -> dict[str, Any]:
    """Asks a process of its own about these bytes; ``run`` ends and reaps it on every path."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_check.handover"],
            input=json.dumps(where),
            capture_output=True,
            text=True,
            timeout=_READER_S,
            pass_fds=descriptors,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"the reading process must end within {_READER_S:.0f} s, it did not") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise CheckFailed(f"the reading process ended with status {done.returncode}: {last}")
    return dict(json.loads(done.stdout))


def read() -> None:
    """The second process: prints the checksum of what stdin names and how long it took.

    stdin holds {"descriptor", "num_bytes"} of a memory file, or {"handle"} of a tensor on the GPU.
    """
    where = json.load(sys.stdin)
    device = "cuda:0" if "handle" in where else "cpu"

    def see() -> torch.Tensor:
        if "handle" in where:
            tensor: torch.Tensor = pickle.loads(
                b64decode(where["handle"])
            )  # torch taught pickle what a handle is
            return tensor
        mapped = mmap.mmap(where["descriptor"], where["num_bytes"])
        return torch.frombuffer(mapped, dtype=torch.uint8)

    if device != "cpu":
        torch.zeros(1, device=device)  # the start of CUDA is no part of what is measured
    tensor, open_s = timed(device, see)
    checksum, sum_s = timed(device, lambda: checksum_tensor(tensor))
    print(json.dumps({"open_s": open_s, "sum_s": sum_s, "checksum": checksum}))


if __name__ == "__main__":
    read()
