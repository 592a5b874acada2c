"""Rounds of a tiny learner in a directory: the orders, the copy of its weights, and the writer."""

from __future__ import annotations

from pathlib import Path

import torch

from swift_stage2.config import Proof
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.disk_rounds import DiskRounds, RoundOnDisk
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.snapshot import Snapshot
from swift_stage2.wire import TensorSpec

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


def snapshot_of(tensors: dict[str, torch.Tensor]) -> Snapshot:
    snapshot = Snapshot(SPECS)
    snapshot.put(tensors.items())
    return snapshot


def order(number: int, run_id: str = "run", version: int | None = None) -> RoundOrder:
    return RoundOrder(
        round_id=f"{run_id}-{number}",
        run_id=run_id,
        version=number if version is None else version,
        manifest=SPECS,
        canary=None,
        proof=Proof.CHECKSUM,
        deadline=Deadline(WAIT_S),
        step=10 * number,
    )


def begin(disk: DiskRounds, number: int, *, num_pushes: int = 1, seed: int = 1) -> RoundOnDisk:
    return disk.begin(order(number), snapshot_of(weights(seed)).buckets(BUCKET_BYTES), num_pushes)


def store(disk: DiskRounds, number: int, *, seed: int = 1) -> Path:
    """One round that a push has written."""
    return disk.store(begin(disk, number, seed=seed), Deadline(WAIT_S))


def prove(disk: DiskRounds, number: int) -> Path:
    """One round that a server has proven, of which all ranks have heard."""
    path = store(disk, number)
    disk.push_ended(disk.current, proven=True)
    disk.confirm(path.name)
    assert disk._keeper is not None
    disk._keeper.join(WAIT_S)
    return path
