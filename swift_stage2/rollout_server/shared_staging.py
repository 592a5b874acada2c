"""Puts tensors where another process can read them: in anonymous memory that ends with its owners.

A memory file (memfd_create(2)) has no name in any directory, so that a killed process leaves nothing behind. The
reader opens it through ``/proc/<owner>/fd``; only that path and the layout travel between the processes.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

_ALIGNMENT = 64

# name, shape, dtype without "torch.", first byte; plain lists pass through vLLM's own encoding
LayoutEntry = list[object]


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Where the tensors lie."""

    path: str
    num_bytes: int
    layout: list[LayoutEntry]


class SharedStaging:
    """One memory file, kept from round to round so that its pages stay mapped."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("swift-stage2-weights", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def put(self, weights: Mapping[str, torch.Tensor]) -> StagedWeights:
        """Copies the tensors in; what was there before is overwritten. Raises OSError without memory."""
        layout: list[LayoutEntry] = []
        starts: list[int] = []
        end = 0
        for name, tensor in weights.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append([name, list(tensor.shape), dtype, end])
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._resize(max(end, _ALIGNMENT))
        for start, tensor in zip(starts, weights.values(), strict=True):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._bytes[start : start + flat.numel()].copy_(flat)
        return StagedWeights(f"/proc/{os.getpid()}/fd/{self._fd}", len(self._bytes), layout)

    def close(self) -> None:
        """Gives the memory back. May be called again."""
        self._unmap()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _resize(self, num_bytes: int) -> None:
        if self._memory is not None and len(self._memory) == num_bytes:
            return
        self._unmap()
        os.ftruncate(self._fd, num_bytes)
        self._memory = mmap.mmap(self._fd, num_bytes)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _unmap(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._memory is not None:
            with suppress(BufferError):  # a view of it lives on; the memory goes with that
                self._memory.close()
            self._memory = None


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
    with warnings.catch_warnings():
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    return {str(name): _view(flat, shape, str(dtype), start) for name, shape, dtype, start in layout}


def _view(flat: torch.Tensor, shape: object, dtype: str, start: object) -> torch.Tensor:
    assert isinstance(shape, list)
    assert isinstance(start, int)
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = kind.itemsize
    for size in shape:
        num_bytes *= size
    return flat[start : start + num_bytes].view(kind).reshape(shape)
