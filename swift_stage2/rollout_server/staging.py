"""Memory that a round's buckets are received into, kept from round to round so that its pages stay mapped.

A model in this process reads it in place. vLLM's workers map it: it then lies in a memory file (memfd_create(2)), which
has no name in any directory, ends with its owners, and is opened through ``/proc/<owner>/fd``.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# name, shape, dtype without "torch.", first byte; plain lists pass through vLLM's own encoding
LayoutEntry = list[Any]

_ALIGNMENT = 64
_EXTENT_BYTES = 4 << 30


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
    """Names the memory file and the place of every tensor in it."""

    path: str
    num_bytes: int
    layout: list[LayoutEntry]


class SharedStaging(StagingBuffers):
    """Buffers one behind the other in one memory file, which is mapped in few large parts.

    Each mapping holds a descriptor of its own, and a model may come in thousands of buckets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.memfd_create("swift-stage2-weights", os.MFD_CLOEXEC)
        self._extents: list[
            tuple[int, torch.Tensor]
        ] = []  # first byte, memory; pages come as they are written
        self._ends: list[int] = []  # of each buffer, its last byte's successor in the file

    def stage(self, weights: Mapping[str, torch.Tensor]) -> StagedWeights:
        """Says where the tensors lie; those outside of the buffers are copied in behind them."""
        layout: list[LayoutEntry] = []
        end = self._ends[-1] if self._ends else 0
        for name, tensor in weights.items():
            start = self._place(tensor)
            if start is None:
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                start, memory = self._take(end, flat.numel())
                memory.copy_(flat)
                end = start + flat.numel()
            layout.append([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), start])
        return StagedWeights(f"/proc/{os.getpid()}/fd/{self._fd}", max(end, 1), layout)

    def trim(self, num_buckets: int) -> None:
        """As ``StagingBuffers.trim``; the memory stays for the buckets to come."""
        super().trim(num_buckets)
        del self._ends[num_buckets:]

    def close(self) -> None:
        super().close()
        self._extents.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new_buffer(self, index: int, num_bytes: int) -> torch.Tensor:
        self.trim(index)  # what lay behind another size moves
        start, memory = self._take(self._ends[-1] if self._ends else 0, num_bytes)
        self._ends.append(start + num_bytes)
        return memory

    def _take(self, end: int, num_bytes: int) -> tuple[int, torch.Tensor]:
        """The first place behind ``end`` with so many bytes in one mapping: its first byte, and its memory."""
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        for first, memory in self._extents:
            at = max(start, first)
            if at + num_bytes <= first + memory.numel():
                return at, memory[at - first : at - first + num_bytes]
        first = sum(memory.numel() for _, memory in self._extents)
        size = -(-max(num_bytes, _EXTENT_BYTES) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._fd, first + size)
        mapped = torch.frombuffer(mmap.mmap(self._fd, size, offset=first), dtype=torch.uint8)
        self._extents.append((first, mapped))
        return first, mapped[:num_bytes]

    def _place(self, tensor: torch.Tensor) -> int | None:
        """The file's byte at which a contiguous tensor in one of the buffers begins."""
        if tensor.is_contiguous() and tensor.numel():
            for first, memory in self._extents:
                offset = tensor.data_ptr() - memory.data_ptr()
                if 0 <= offset < memory.numel():
                    return first + offset
        return None


def open_staged(path: str, num_bytes: int, layout: list[LayoutEntry]) -> dict[str, torch.Tensor]:
    """The tensors, as views of one private mapping: what a reader writes to them reaches nobody else.

    Raises:
        OSError: the owner is gone, or this process may not read its memory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flat = map_privately(fd, num_bytes)
    finally:
        os.close(fd)
    tensors = {}
    for name, shape, dtype, start in layout:
        kind: torch.dtype = getattr(torch, dtype)
        end = start + kind.itemsize * math.prod(shape)
        tensors[name] = typed_view(flat[start:end], kind, shape)
    return tensors


def map_privately(fd: int, num_bytes: int) -> torch.Tensor:
    """The first bytes of a file, which are read where they lie: a page is copied only when it is written to.

    Raises:
        OSError: the file cannot be mapped.
    """
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def typed_view(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor's bytes as that tensor; a copy where it begins between two items of its dtype."""
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(list(shape))
