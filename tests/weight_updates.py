"""The learner's side of updates, as tests build it: one rank, small buckets, a canary that agrees."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from stand_in_canary import StandInCanary, UnaskedCanary

from swift_stage2.config import Proof, RolloutConfig
from swift_stage2.config.rollout import ServerConfig, SyncConfig
from swift_stage2.servers.session import Deadline, ServerSession
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import UpdateSpec
from swift_stage2.weights.publisher_process import ProcessPublisher
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.weights.transport import Delivery
from swift_stage2.weights.waited_updates import WaitedUpdates

_OF_SYNC = {field.name for field in fields(SyncConfig)} - {"bucket_mib"}


def make_updates(
    weights: torch.nn.Module | WeightExport, publisher: Any, num_servers: int = 1, **options: Any
) -> WaitedUpdates:
    """Updates of these weights by this publisher. ``options``: of ``SyncConfig`` and ``WaitedUpdates``."""
    sync = {name: options.pop(name) for name in _OF_SYNC & options.keys()}
    settings: dict[str, Any] = {"canary": StandInCanary(), "run_id": "run", "bucket_mib": 1}
    export = weights if isinstance(weights, WeightExport) else WeightExport(weights)
    config = SyncConfig(**{"timeout_s": 60.0, "proof": Proof.CANARY} | sync)
    return WaitedUpdates(num_servers, export=export, publisher=publisher, sync=config, **settings | options)


def make_updates_by_checksums(weights: torch.nn.Module, publisher: Any, **options: Any) -> WaitedUpdates:
    """Updates that checksums prove, and nothing else."""
    return make_updates(weights, publisher, canary=UnaskedCanary(), proof=Proof.CHECKSUM, **options)


def make_spec(seconds: float, **terms: Any) -> UpdateSpec:
    """Of a push without a canary, whose calls end after so many seconds."""
    settings: dict[str, Any] = {
        "identity": WeightIdentity("run", 1),
        "manifest": (),
        "canary": None,
        "proof": Proof.AUTO,
        "deadline": Deadline(seconds),
    }
    return UpdateSpec(**settings | terms)


def mark_suspect(updates: WaitedUpdates, *servers: int) -> None:
    """As all ranks agree on it."""
    updates.updates.apply_agreement((), suspect=servers, drained=())


def server_at(base_url: str, group_port: int, **more: Any) -> ServerConfig:
    return ServerConfig(base_url=base_url, group_port=group_port, **more)


def delivery(server: ServerConfig, seconds: float = 5.0, snapshot: SnapshotFile | None = None) -> Delivery:
    """Of a push that ``make_spec`` tells, by default of no tensors."""
    snapshot = snapshot or SnapshotFile((), bucket_bytes=1)
    return Delivery(ServerSession(server.base_url), server, snapshot, make_spec(seconds))


def process_publisher(*servers: ServerConfig, **sync: Any) -> ProcessPublisher:
    """A publisher's process for weights on the CPU."""
    rollout = RolloutConfig(servers=servers, sync=SyncConfig(**sync))
    return ProcessPublisher(rollout, torch.device("cpu"))
