"""Holds the weights of one step, copied out of the learner, so that training may go on while servers take them."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_stage2.errors import WeightSyncError
from swift_stage2.process.main_memory import available_memory_bytes
from swift_stage2.servers.protocol import TensorSpec
from swift_stage2.weights.tensors import all_finite, checksum_tensors, describe_flat, flatten


def snapshot_bytes(manifest: Iterable[TensorSpec]) -> int:
    """Main memory that a snapshot of these tensors takes."""
    return sum(map(_spec_bytes, manifest))


def _spec_bytes(spec: TensorSpec) -> int:
    itemsize: int = getattr(torch, spec.dtype).itemsize
    return itemsize * math.prod(spec.shape)


logger = logging.getLogger(__name__)


class Snapshot:
    """Memory for every tensor of one manifest, in the learner's own dtypes; kept and filled anew for each round."""

    def __init__(self, manifest: Sequence[TensorSpec], *, pinned: bool = False) -> None:
        """``pinned``: a GPU copies straight into it.

        Raises:
            WeightSyncError: main memory has no room for it.
        """
        # By item size: one behind the other without a gap, each begins where a view of its dtype may.
        by_size = sorted(manifest, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
        sizes = [_spec_bytes(spec) for spec in by_size]
        _require_room(sum(sizes))
        self._flat = torch.empty(sum(sizes), dtype=torch.uint8)
        if pinned:
            _pin(self._flat)
        self._tensors = {
            spec.name: part.view(getattr(torch, spec.dtype)).reshape(spec.shape)
            for spec, part in zip(by_size, torch.split(self._flat, sizes), strict=True)
        }

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return self._flat.numel()

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors in, from whatever device holds them."""
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)

    def buckets(self, max_bytes: int) -> tuple[WeightBucket, ...]:
        """All tensors in buckets of at most ``max_bytes`` in the learner's dtypes; a larger tensor goes alone."""
        buckets: list[WeightBucket] = []
        bucket: list[tuple[str, torch.Tensor]] = []
        start = end = 0
        for name, tensor in self._tensors.items():
            if bucket and end - start + tensor.nbytes > max_bytes:
                buckets.append(WeightBucket(bucket, self._flat[start:end]))
                bucket, start = [], end
            bucket.append((name, tensor))
            end += tensor.nbytes
        return (*buckets, WeightBucket(bucket, self._flat[start:end])) if bucket else tuple(buckets)


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """Bytes that one push sends, where each tensor lies in them, and the checksum of each by name."""

    flat: torch.Tensor  # uint8, one dimension
    metadata: list[dict[str, object]]
    checksums: dict[str, str]


class WeightBucket:
    """Named tensors of the learner's own dtypes that lie one behind the other in ``flat``, which nobody changes."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]], flat: torch.Tensor) -> None:
        self._tensors = tuple(tensors)
        self._flat = flat
        self._lock = threading.Lock()
        self._known: dict[tuple[torch.dtype, ...], dict[str, str]] = {}  # checksums

    def pack(self, dtypes: Mapping[str, str], memory: CastMemory) -> PackedBucket:
        """The bucket in the dtypes named for its tensors (default: their own), cast into ``memory`` if it must be.

        Raises:
            WeightSyncError: a tensor is not finite.
        """
        wanted = tuple(
            getattr(torch, dtypes[name]) if name in dtypes else tensor.dtype for name, tensor in self._tensors
        )
        own = tuple(tensor.dtype for _, tensor in self._tensors)
        flat, tensors = self._flat, self._tensors
        if wanted != own:
            flat, tensors = memory.cast(self._tensors, wanted)
        with self._lock:  # whoever comes second needs the same sums
            if not self._known:
                _require_finite(self._tensors)
            if wanted not in self._known:
                sums = checksum_tensors([tensor for _, tensor in tensors])
                self._known[wanted] = {name: each for (name, _), each in zip(tensors, sums, strict=True)}
            checksums = self._known[wanted]
        return PackedBucket(flat, describe_flat(tensors), checksums)


class CastMemory:
    """Keeps one push's memory for casts from bucket to bucket: new pages cost several times what a copy does."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def cast(
        self, tensors: Sequence[tuple[str, torch.Tensor]], dtypes: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, tuple[tuple[str, torch.Tensor], ...]]:
        """One uint8 tensor, valid until the next call, and the tensors in ``dtypes``."""
        cast = tuple((name, tensor.to(dtype)) for (name, tensor), dtype in zip(tensors, dtypes, strict=True))
        num_bytes = sum(tensor.nbytes for _, tensor in cast)
        if self._kept.numel() < num_bytes:
            self._kept = torch.empty(num_bytes, dtype=torch.uint8)
        return flatten(cast, self._kept[:num_bytes])[0], cast


def _pin(memory: torch.Tensor) -> None:
    """In place: PyTorch's own allocator of pinned memory takes the next power of two, up to twice the weights."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if status := int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
        logger.warning(
            "the weights' copy in main memory cannot be pinned (CUDA error %d): copies are slower", status
        )
    else:
        weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, memory.data_ptr())


def _require_room(num_bytes: int) -> None:
    available = available_memory_bytes()
    if num_bytes > available:
        raise WeightSyncError(
            f"rank 0 keeps a copy of the weights in main memory, got {num_bytes / 1e9:.1f} GB of weights and "
            f"{available / 1e9:.1f} GB available; give its machine or container more, or train a smaller model"
        )


def _require_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if not all_finite(tensor):
            raise WeightSyncError(
                f"weights must be finite to be pushed, got a NaN or infinity in tensor={name}; "
                "lower the learning rate or resume from an earlier checkpoint"
            )
