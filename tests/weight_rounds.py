"""The learner's side of a round, as tests build it: one rank, small buckets, a canary that agrees."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_canary import StandInCanary, UnaskedCanary

from swift_stage2.collectives import SingleRank
from swift_stage2.config import Proof, Transport
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.courier_worker import CourierSetup
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.sync_round import WeightSync
from swift_stage2.weights.transport import ServerEndpoint


def make_order(seconds: float, **terms: Any) -> RoundOrder:
    """Terms of a round without a canary, whose calls end after so many seconds."""
    settings: dict[str, Any] = {
        "run_id": "run",
        "version": 1,
        "manifest": (),
        "canary": None,
        "proof": Proof.AUTO,
        "deadline": Deadline(seconds),
    }
    return RoundOrder(**settings | terms)


def make_sync(weights: torch.nn.Module | WeightExport, courier: Any, **options: Any) -> WeightSync:
    """A sync of these weights by this courier."""
    settings: dict[str, Any] = {
        "control": SingleRank(),
        "canary": StandInCanary(),
        "run_id": "run",
        "timeout_s": 60.0,
        "bucket_mib": 1,
    }
    export = weights if isinstance(weights, WeightExport) else WeightExport(weights)
    return WeightSync(export=export, courier=courier, **settings | options)


def make_sync_by_checksums(weights: torch.nn.Module, courier: Any, **options: Any) -> WeightSync:
    """A sync whose rounds checksums prove, and nothing else."""
    return make_sync(weights, courier, canary=UnaskedCanary(), proof=Proof.CHECKSUM, **options)


def courier_setup(*endpoints: ServerEndpoint, **options: Any) -> CourierSetup:
    """Of a courier's process on the CPU."""
    settings: dict[str, Any] = {
        "api_key": None,
        "ours": frozenset(),
        "device": torch.device("cpu"),
        "transport": Transport.SHARED_MEMORY,
        "is_traced": False,
    }
    return CourierSetup(endpoints=endpoints, **settings | options)
