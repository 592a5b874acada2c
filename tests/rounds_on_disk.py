"""Versions of a tiny learner: its snapshots, and a directory that they are written into."""

from __future__ import annotations

from pathlib import Path

import torch

from swift_stage2.servers.session import Deadline
from swift_stage2.weights.disk_versions import DiskVersions
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.wire import TensorSpec, WeightOffer, WeightWay

WAIT_S = 60.0
SPECS = (
    TensorSpec("odd", (3,), "bfloat16"),
    TensorSpec("scalar", (), "float32"),
    TensorSpec("none", (0, 4), "float32"),
    TensorSpec("wide", (64, 32), "float32"),
    TensorSpec("flags", (5,), "bool"),
)
BUCKET_BYTES = 4096  # less than ``wide`` alone


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}
    return {spec.name: drawn[spec.name].to(getattr(torch, spec.dtype)) for spec in SPECS}


def identity(number: int = 1, run_id: str = "run") -> WeightIdentity:
    return WeightIdentity(run_id, number, 10 * number)


def offer(number: int = 1, specs: tuple[TensorSpec, ...] = SPECS, run_id: str = "run") -> WeightOffer:
    return WeightOffer(run_id, number, specs, WeightWay.DISK, timeout_s=WAIT_S)


def snapshot(number: int = 1, *, seed: int = 1, run_id: str = "run") -> SnapshotFile:
    """One whose header is written."""
    snapshot = SnapshotFile(SPECS, bucket_bytes=BUCKET_BYTES)
    snapshot.put(weights(seed).items())
    snapshot.describe(identity(number, run_id))
    return snapshot


def store(disk: DiskVersions, number: int) -> None:
    """One version that a push has written."""
    disk.store(snapshot(number), identity(number), Deadline(WAIT_S))


def prove(disk: DiskVersions, number: int) -> Path:
    """One version that a server has proven, of which all ranks have heard."""
    store(disk, number)
    disk.confirm(number)
    return disk.directory / f"run-{number}.safetensors"
