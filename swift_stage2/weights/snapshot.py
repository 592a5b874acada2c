"""Holds the weights of one step, copied out of the learner, so that training may go on while servers take them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from swift_stage2.servers.protocol import TensorSpec
from swift_stage2.weights.tensors import WeightBucket


class Snapshot:
    """Memory for every tensor of one manifest, in the learner's own dtypes; kept and filled anew for each round."""

    def __init__(self, manifest: Sequence[TensorSpec], *, pinned: bool = False) -> None:
        """``pinned``: a GPU copies straight into it."""
        # By item size: one behind the other without a gap, each begins where a view of its dtype may.
        by_size = sorted(manifest, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
        sizes = [getattr(torch, spec.dtype).itemsize * math.prod(spec.shape) for spec in by_size]
        self._flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
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
