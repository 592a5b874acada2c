"""Holds the weights of one step, copied out of the learner, so that training may go on while servers take them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_stage2.errors import WeightSyncError
from swift_stage2.weights.copy_stream import Copy
from swift_stage2.weights.snapshot_memory import SnapshotMemory
from swift_stage2.weights.tensors import all_finite, checksum_tensors, describe_flat, num_bytes
from swift_stage2.wire import TensorSpec


def snapshot_bytes(manifest: Iterable[TensorSpec]) -> int:
    """Main memory that a snapshot of these tensors takes."""
    return sum(map(num_bytes, manifest))


logger = logging.getLogger(__name__)

ReadTensors = Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]]


class Snapshot:
    """Memory for every tensor of one manifest, in the learner's own dtypes; kept and filled anew for each round."""

    def __init__(
        self, manifest: Sequence[TensorSpec], memory: SnapshotMemory | None = None, *, pinned: bool = False
    ) -> None:
        """Fills ``memory``, which holds nothing yet. ``pinned``: a GPU copies straight into it.

        Raises:
            WeightSyncError: main memory has no room for it.
        """
        # By item size: one behind the other without a gap, each begins where a view of its dtype may.
        by_size = sorted(manifest, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
        sizes = [num_bytes(spec) for spec in by_size]
        self.memory = memory or SnapshotMemory()
        self._flat = self.memory.allocate(sum(sizes), {spec.name: spec.dtype for spec in manifest})
        if pinned:
            _pin(self._flat)
        self._tensors = {
            spec.name: part.view(getattr(torch, spec.dtype)).reshape(spec.shape)
            for spec, part in zip(by_size, torch.split(self._flat, sizes), strict=True)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._flat.numel()

    def put(self, tensors: Iterable[tuple[str, torch.Tensor]], copy: Copy = torch.Tensor.copy_) -> None:
        """Copies tensors in, from whatever device holds them."""
        for name, tensor in tensors:
            copy(self._tensors[name], tensor)

    def take(
        self,
        read: ReadTensors,
        names: Sequence[str],
        copy: Copy = torch.Tensor.copy_,
        *,
        at_once: bool = False,
    ) -> None:
        """``put`` of what ``read`` gives; one tensor at a time if its device has no memory for all of them.

        Raises torch.OutOfMemoryError: not even for one, or they must be read ``at_once``.
        """
        try:
            self.put(read(names), copy)
            return
        except torch.OutOfMemoryError as error:
            if at_once or len(names) == 1:
                raise
            logger.warning("%d tensors of a round are copied one at a time: %s", len(names), error)
        for name in names:  # here, where the error holds none of those that were read
            self.put(read([name]), copy)

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
        self.tensors = tuple(tensors)
        self._flat = flat
        self._lock = threading.Lock()
        self._known: dict[tuple[torch.dtype, ...], dict[str, str]] = {}  # checksums

    def pack(self, dtypes: Mapping[str, str], memory: CastMemory) -> PackedBucket:
        """The bucket in the dtypes named for its tensors (default: their own), cast into ``memory`` if it must be.

        Raises:
            WeightSyncError: a tensor is not finite.
        """
        wanted = tuple(
            getattr(torch, dtypes[name]) if name in dtypes else tensor.dtype for name, tensor in self.tensors
        )
        own = tuple(tensor.dtype for _, tensor in self.tensors)
        flat, tensors = self._flat, self.tensors
        if wanted != own:
            flat, tensors = memory.cast(self.tensors, wanted)
        with self._lock:  # whoever comes second needs the same sums
            if not self._known:
                _require_finite(self.tensors)
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
        sizes = [tensor.numel() * dtype.itemsize for (_, tensor), dtype in zip(tensors, dtypes, strict=True)]
        if self._kept.numel() < sum(sizes):
            self._kept = torch.empty(sum(sizes), dtype=torch.uint8)
        flat = self._kept[: sum(sizes)]
        cast = []
        for (name, tensor), dtype, part in zip(tensors, dtypes, torch.split(flat, sizes), strict=True):
            if part.storage_offset() % dtype.itemsize:  # behind an odd number of smaller items
                whole = tensor.to(dtype)
                part.copy_(whole.reshape(-1).view(torch.uint8))
            else:
                whole = part.view(dtype).reshape(tensor.shape).copy_(tensor)
            cast.append((name, whole))
        return flat, tuple(cast)


def _pin(memory: torch.Tensor) -> None:
    """In place: PyTorch's own allocator of pinned memory takes the next power of two, up to twice the weights."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if status := int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
        logger.warning(
            "the weights' copy in main memory cannot be pinned (CUDA error %d): copies are slower", status
        )
    else:
        weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, memory.data_ptr())


def _require_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if not all_finite(tensor):
            raise WeightSyncError(
                f"weights must be finite to be pushed, got a NaN or infinity in tensor={name}; "
                "lower the learning rate or resume from an earlier checkpoint"
            )
