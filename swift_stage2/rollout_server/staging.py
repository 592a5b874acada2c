"""Memory that a round's buckets are received into, kept from round to round so that its pages stay mapped.

A model in this process reads it in place. vLLM's workers map it: it then lies in a memory file (memfd_create(2)), which
has no name in any directory, ends with its owners, and is opened through ``/proc/<owner>/fd``.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# name, shape, dtype without "torch.", first byte; plain lists pass through vLLM's own encoding
LayoutEntry = list[Any]


class StagingBuffers:
    """One uint8 buffer for every bucket of a round."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def buffer(self, index: int, num_bytes: int) -> torch.Tensor:
        """The buffer of bucket number ``index``; reused when its size has not changed."""
        kept = self._buffers.get(index)
        if kept is None or kept.numel() != num_bytes:
            kept = self._buffers[index] = self._new_buffer(index, num_bytes)
        return kept

    def trim(self, num_buckets: int) -> None:
        """Frees the buffers that a round with ``num_buckets`` did not need."""
        for index in [index for index in self._buffers if index >= num_buckets]:
            del self._buffers[index]

    def close(self) -> None:
        """Gives the memory back. May be called again."""
        self._buffers.clear()

    def _new_buffer(self, index: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Where the tensors lie."""

    path: str
    num_bytes: int
    layout: list[LayoutEntry]


class SharedStaging(StagingBuffers):
    """Buffers one behind the other in one memory file."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.memfd_create("swift-stage2-weights", os.MFD_CLOEXEC)
        self._num_bytes = 0
        self._starts: dict[int, int] = {}

    def stage(self, weights: Mapping[str, torch.Tensor]) -> StagedWeights:
        """Says where the tensors lie; those outside of the buffers are copied in behind them.

        What was there before is overwritten.
        """
        layout: list[LayoutEntry] = []
        strays: dict[int, torch.Tensor] = {}
        end = first_stray = self._end(len(self._buffers))
        for name, tensor in weights.items():
            start = self._place(tensor)
            if start is None:
                start, strays[end] = end, tensor
                end = _aligned(end + tensor.numel() * tensor.element_size())
            layout.append([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), start])
        self._resize(max(end, mmap.PAGESIZE))
        if strays:
            memory = self._map(first_stray, end - first_stray)
            for start, tensor in strays.items():
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                memory[start - first_stray :][: flat.numel()].copy_(flat)
        return StagedWeights(f"/proc/{os.getpid()}/fd/{self._fd}", self._num_bytes, layout)

    def close(self) -> None:
        """As ``StagingBuffers.close``."""
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new_buffer(self, index: int, num_bytes: int) -> torch.Tensor:
        self.trim(index)  # what lay behind another size moves
        self._starts[index] = start = self._end(index)
        self._resize(start + _aligned(num_bytes))
        return self._map(start, num_bytes)

    def _end(self, num_buckets: int) -> int:
        """The first byte behind so many buffers."""
        last = num_buckets - 1
        return self._starts[last] + _aligned(self._buffers[last].numel()) if num_buckets else 0

    def _place(self, tensor: torch.Tensor) -> int | None:
        """The file's byte at which a contiguous tensor in one of the buffers begins."""
        address = tensor.data_ptr()
        for index, buffer in self._buffers.items():
            offset = address - buffer.data_ptr()
            if (
                tensor.is_contiguous()
                and 0 <= offset <= buffer.numel() - tensor.numel() * tensor.element_size()
            ):
                return self._starts[index] + offset
        return None

    def _resize(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)
        self._num_bytes = num_bytes

    def _map(self, start: int, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self._fd, num_bytes, offset=start), dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    """Up to the next page, where a mapping may begin."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def open_staged(path: str, num_bytes: int, layout: list[LayoutEntry]) -> dict[str, torch.Tensor]:
    """The tensors, as views of one private mapping: what a reader writes to them reaches nobody else.

    Raises:
        OSError: the owner is gone, or this process may not read its memory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = {}
    for name, shape, dtype, start in layout:
        kind: torch.dtype = getattr(torch, dtype)
        end = start + kind.itemsize * math.prod(shape)
        tensors[name] = flat[start:end].view(kind).reshape(shape)
    return tensors
