"""Some of the learner's tensors on their way to the servers, packed once for each set of dtypes that is wanted.

Made by the round's main thread, packed by the first push that needs it, shared by all. A bucket may alias
the training weights: nothing trains while a round runs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swift_stage2.weights.checksum import checksum_tensor
from swift_stage2.weights.export import flatten


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """What one push sends: bytes, where each tensor lies in them, and the checksum of each by name."""

    flat: torch.Tensor  # uint8, one dimension
    metadata: list[dict[str, object]]
    checksums: dict[str, str]


class WeightBucket:
    """Named tensors in the learner's own dtypes."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tuple(tensors)
        self._lock = threading.Lock()
        self._packed: dict[tuple[torch.dtype, ...], PackedBucket] = {}

    def pack(self, dtypes: Mapping[str, str]) -> PackedBucket:
        """The bucket in the dtypes named for its tensors (default: their own), made on the first call for them."""
        wanted = tuple(
            getattr(torch, dtypes[name]) if name in dtypes else tensor.dtype for name, tensor in self._tensors
        )
        with self._lock:  # of computing only: whoever comes second waits for what it needs itself
            packed = self._packed.get(wanted)
            if packed is None:
                packed = self._packed[wanted] = self._pack(wanted)
            return packed

    def _pack(self, wanted: tuple[torch.dtype, ...]) -> PackedBucket:
        cast = [
            (name, tensor.to(dtype).contiguous())
            for (name, tensor), dtype in zip(self._tensors, wanted, strict=True)
        ]
        flat, metadata = flatten(cast)
        return PackedBucket(flat, metadata, {name: checksum_tensor(tensor) for name, tensor in cast})
