"""How weights reach vLLM's workers, and what shows the weights that a model then holds.

Tensors travel in anonymous memory that ends with its owners: a memory file (memfd_create(2)) has no name in any
directory; the reader opens it through ``/proc/<owner>/fd``. vLLM fuses parameters (q, k and v in one; gate and up in
one) and cuts them over ranks, so a parameter's checksum cannot be compared by name. ``LoadTrace`` records every copy
out of the given tensors while the model's own loader runs; read back, each copy's destination shows the bytes of one
piece of one tensor where the model now keeps it.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.engine import InstalledWeights
from swift_stage2.weights.tensors import checksum_tensor

_ALIGNMENT = 64

# name, shape, dtype without "torch.", first byte; plain lists pass through vLLM's own encoding
LayoutEntry = list[Any]


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
        end = 0
        for name, tensor in weights.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append([name, list(tensor.shape), dtype, end])
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._resize(max(end, _ALIGNMENT))
        for (*_, start), tensor in zip(layout, weights.values(), strict=True):
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
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = {}
    for name, shape, dtype, start in layout:
        kind: torch.dtype = getattr(torch, dtype)
        end = start + kind.itemsize * math.prod(shape)
        tensors[name] = flat[start:end].view(kind).reshape(shape)
    return tensors


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of one tensor (offset, shape and stride count its elements), as given and as held now."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    given: str
    held: str  # checksums


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies while it is entered. ``drop_copies`` makes the load a load of nothing (a test's fault)."""

    def __init__(self, weights: Mapping[str, torch.Tensor], *, drop_copies: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = dict(weights)
        spans = sorted((tensor.data_ptr(), name) for name, tensor in weights.items() if tensor.numel())
        self._starts = [start for start, _ in spans]
        self._names = [name for _, name in spans]
        self._drop_copies = drop_copies
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self._owner(source)
            if name is not None:
                self._copies.append((name, target, source))
                if self._drop_copies:
                    return target
        return func(*args, **(kwargs or {}))

    def pieces(self, parameters: Sequence[torch.Tensor]) -> list[TensorPiece]:
        """What was copied into storage that the model's parameters still use, checksums taken now."""
        in_use = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        return [
            TensorPiece(
                name=name,
                offset=(source.data_ptr() - self._weights[name].data_ptr()) // source.element_size(),
                shape=tuple(source.shape),
                stride=tuple(source.stride()),
                given=checksum_tensor(source.expand(target.shape).to(target.dtype)),
                held=checksum_tensor(target),
            )
            for name, target, source in self._copies
            if target.untyped_storage().data_ptr() in in_use
        ]

    def untouched(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Parameters into whose storage nothing was copied."""
        touched = {target.untyped_storage().data_ptr() for _, target, _ in self._copies}
        return [
            name
            for name, parameter in parameters.items()
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in touched
        ]

    def _owner(self, source: torch.Tensor) -> str | None:
        """The given tensor that ``source`` is a view of."""
        if not isinstance(source, torch.Tensor) or source.device.type != "cpu" or not source.numel():
            return None
        address = source.data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        tensor = self._weights[self._names[index]]
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return self._names[index] if address < end else None


def resident_checksums(
    shapes: Mapping[str, Sequence[int]], read: Mapping[str, str], pieces: Sequence[TensorPiece]
) -> dict[str, str]:
    """Checksum by name of what the model holds of each tensor; a tensor that is not traced whole is left out.

    ``read`` holds the checksums of the tensors as the loader was given them. A tensor copied whole has its own
    resident checksum. One that was cut (over ranks), or is held in another dtype, is told as ``read`` says
    once every piece is held as given and the pieces together cover it; else by its first wrong piece.
    """
    by_name: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    return {
        name: checksum
        for name, checksum_given in read.items()
        if (checksum := _resident(shapes[name], checksum_given, by_name.get(name, []))) is not None
    }


def _resident(shape: Sequence[int], given: str, pieces: Sequence[TensorPiece]) -> str | None:
    num_elements = math.prod(shape)
    if num_elements == 0:
        return given
    wrong = next((piece for piece in pieces if piece.held != piece.given), None)
    if wrong is not None:
        return wrong.held
    whole = [piece for piece in pieces if piece.shape == tuple(shape) and piece.offset == 0]
    if whole:
        return given if len(whole) < len(pieces) or whole[0].given != given else whole[0].held
    covered = torch.zeros(num_elements, dtype=torch.bool)
    for piece in pieces:
        covered.as_strided(piece.shape, piece.stride, piece.offset).fill_(True)
    return given if bool(covered.all()) else None


def installed_weights(
    weights: Mapping[str, torch.Tensor], reports: Sequence[Mapping[str, Any]]
) -> InstalledWeights:
    """One answer of the reports of all workers. Raises RoundFailed when they did not read the same bytes."""
    read = dict(reports[0]["read"])
    if any(dict(report["read"]) != read for report in reports):
        raise RoundFailed("vLLM's workers read different weights", torn=True)
    pieces = [
        TensorPiece(name, offset, tuple(shape), tuple(stride), given, held)
        for report in reports
        for name, offset, shape, stride, given, held in report["pieces"]
    ]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    traced = {piece.name for piece in pieces}
    return InstalledWeights(
        loaded=tuple(name for name in weights if name in traced),
        resident=resident_checksums(shapes, read, pieces),
    )
