"""A batch in memory that two processes share: written once by the one that made it, never copied by the other.

The memory is an anonymous file (memfd_create(2)): it has no name that could outlive its processes, and the kernel takes
it back when the last tensor in it is gone.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64  # bytes; a cache line, and more than any element needs
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class BatchOutline:
    """A batch without its tensors' contents. Pickled: for the process that started this one, or was started by it."""

    pickled: bytes
    num_bytes: int


class _Pickler(pickle.Pickler):
    """Takes tensors out and gives each a place, wherever in the batch they are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.placed: list[tuple[int, torch.Tensor]] = []
        self.num_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.device.type != "cpu" or obj.layout is not torch.strided:
            raise ValueError(
                f"a batch must hold dense tensors in main memory, got one of shape {tuple(obj.shape)} on {obj.device}, "
                f"{obj.layout}; let the template's collator return CPU tensors"
            )
        offset = self.num_bytes
        self.placed.append((offset, obj))
        self.num_bytes += -(-obj.numel() * obj.element_size() // _ALIGNMENT) * _ALIGNMENT
        return _TENSOR, offset, obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, offset, dtype, shape = pid
        return _view(self._memory, offset, dtype, shape)


def write_batch(batch: Any) -> tuple[BatchOutline, int]:
    """Writes a batch's tensors into new shared memory; the caller owns the file descriptor.

    Raises:
        ValueError: a tensor is not a dense one in main memory.
        OSError: there is no memory for it.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(batch)
    descriptor = os.memfd_create("swift_stage2-batch", os.MFD_CLOEXEC)
    try:
        if pickler.num_bytes:
            _reserve(descriptor, pickler.num_bytes)
            memory = mmap.mmap(descriptor, pickler.num_bytes)
            for offset, tensor in pickler.placed:
                _view(memory, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    except BaseException:
        os.close(descriptor)
        raise
    return BatchOutline(file.getvalue(), pickler.num_bytes), descriptor


def read_batch(outline: BatchOutline, descriptor: int) -> Any:
    """The batch, its tensors lying in the shared memory; takes over the file descriptor."""
    try:
        memory = mmap.mmap(descriptor, outline.num_bytes) if outline.num_bytes else None
    finally:
        os.close(descriptor)
    return _Unpickler(io.BytesIO(outline.pickled), memory).load()


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Memory that is not there is told now, not by SIGBUS when it is touched."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"a pack needs {num_bytes} bytes of main memory, got {error.strerror}; lower packing.packing_length or "
            "prefetch.queue_limit",
        ) from error


def _view(memory: mmap.mmap | None, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if memory is None or count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
