"""Shows which weights a model of vLLM holds after a load.

vLLM fuses parameters (q, k and v in one; gate and up in one) and cuts them over ranks, so a parameter's checksum cannot
be compared by name. ``LoadTrace`` records every copy out of the given tensors while the model's own loader runs; read
back, each copy's destination shows the bytes of one piece of one tensor where the model now keeps it.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from swift_stage2.errors import InstallFailed
from swift_stage2.rollout_server.engine import InstalledWeights
from swift_stage2.weights.tensors import checksum_tensor, checksum_tensors


class TensorPiece(NamedTuple):
    """A part of one tensor (offset, shape and stride count its elements), with its checksums as given and as held now.

    A list of these fields passes through vLLM's own encoding.
    """

    name: str
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    given: str
    held: str = ""


class CopiedPart(NamedTuple):
    """The place that a piece was copied to; keeps neither tensor nor memory alive."""

    piece: TensorPiece
    storage: StorageWeakRef
    dtype: torch.dtype
    target: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and stride in the storage


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies while it is entered. ``drop_copies`` makes the load a load of nothing (a test's fault)."""

    def __init__(self, weights: Mapping[str, torch.Tensor], *, drop_copies: bool = False) -> None:
        """``weights`` are all on one device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = dict(weights)
        self._devices = {tensor.device for tensor in weights.values()}
        self._spans = sorted((tensor.data_ptr(), name) for name, tensor in weights.items() if tensor.numel())
        self._drop_copies = drop_copies
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._owner(args[1])) is not None:
            self._copies.append((name, args[0], args[1]))
            if self._drop_copies:
                return args[0]
        return func(*args, **(kwargs or {}))

    def parts(self, read: Mapping[str, str]) -> list[CopiedPart]:
        """Every part that was copied, wherever to, with its checksum as given.

        ``read`` holds the checksums of the given tensors: one that was copied whole is not summed again.
        """
        parts = []
        for name, target, source in self._copies:  # one at a time: each may need a copy of its own
            given = (
                read[name]
                if self._is_whole(name, target, source)
                else checksum_tensor(source.expand(target.shape).to(target.dtype))
            )
            offset = (source.data_ptr() - self._weights[name].data_ptr()) // source.element_size()
            piece = TensorPiece(name, offset, list(source.shape), list(source.stride()), given)
            storage = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]
            place = (int(target.storage_offset()), tuple(target.shape), tuple(target.stride()))
            parts.append(CopiedPart(piece, storage, target.dtype, place))
        return parts

    def _is_whole(self, name: str, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether this copy took all bytes of the given tensor, in the same order and dtype."""
        given = self._weights[name]
        return (
            source.shape == target.shape
            and source.numel() == given.numel()
            and source.dtype == target.dtype == given.dtype
            and source.is_contiguous()
            and given.is_contiguous()
        )

    def _owner(self, source: torch.Tensor) -> str | None:
        """The given tensor that ``source`` is a view of."""
        if not isinstance(source, torch.Tensor) or source.device not in self._devices or not source.numel():
            return None
        address = source.data_ptr()
        index = bisect.bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        if index < 0:
            return None
        start, name = self._spans[index]
        return name if address < start + self._weights[name].nbytes else None


def held_pieces(parts: Iterable[CopiedPart], parameters: Iterable[torch.Tensor]) -> list[TensorPiece]:
    """Every part in storage that the model's parameters still use, its checksum taken there now."""
    in_use = {storage._cdata: storage for storage in (each.untyped_storage() for each in parameters)}
    kept = [(part, in_use[part.storage.cdata]) for part in parts if part.storage.cdata in in_use]
    held = checksum_tensors(
        [
            torch.empty(0, dtype=part.dtype, device=storage.device).set_(storage, *part.target)
            for part, storage in kept
        ]
    )
    return [part.piece._replace(held=now) for (part, _), now in zip(kept, held, strict=True)]


def untouched(parts: Iterable[CopiedPart], parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters into whose storage nothing was copied."""
    touched = {part.storage.cdata for part in parts}
    return [
        name
        for name, parameter in parameters.items()
        if parameter.numel() and parameter.untyped_storage()._cdata not in touched
    ]


def resident_checksums(
    shapes: Mapping[str, Sequence[int]], read: Mapping[str, str], pieces: Iterable[Sequence[Any]]
) -> dict[str, str]:
    """Checksum by name of what the model holds of each tensor; a tensor that is not traced whole is left out.

    ``read`` holds the checksums of the tensors as the loader was given them; ``pieces`` are the fields of all workers'
    ``TensorPiece``. A tensor that is held in one piece or many is told as ``read`` says once every piece is held as
    given and they together cover it; else by its first wrong piece.
    """
    by_name: dict[str, list[TensorPiece]] = defaultdict(list)
    for fields in pieces:
        piece = TensorPiece(*fields)
        by_name[piece.name].append(piece)
    sums = {name: _resident(shapes[name], given, by_name[name]) for name, given in read.items()}
    return {name: held for name, held in sums.items() if held is not None}


def installed_weights(
    weights: Mapping[str, torch.Tensor], reports: Sequence[Mapping[str, Any]]
) -> InstalledWeights:
    """One answer of the reports of all workers. Raises InstallFailed when they did not read the same bytes, or none."""
    unreadable = [report["unreadable"] for report in reports if "unreadable" in report]
    if unreadable:
        raise InstallFailed(
            f"vLLM's workers must read the weights, got in {len(unreadable)} of {len(reports)}: {unreadable[0]}",
            torn=len(unreadable) < len(reports),
        )
    read = dict(reports[0]["read"])
    if any(report["read"] != read for report in reports):
        raise InstallFailed("vLLM's workers read different weights", torn=True)
    pieces = [piece for report in reports for piece in report["pieces"]]
    traced = {name for name, *_ in pieces}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    loaded = tuple(name for name in weights if name in traced)
    return InstalledWeights(loaded, read, resident_checksums(shapes, read, pieces))


def _resident(shape: Sequence[int], given: str, pieces: Sequence[TensorPiece]) -> str | None:
    num_elements = math.prod(shape)
    if num_elements == 0:
        return given
    wrong = next((piece for piece in pieces if piece.held != piece.given), None)
    if wrong is not None:
        return wrong.held
    covered = torch.zeros(num_elements, dtype=torch.bool)
    for piece in pieces:
        covered.as_strided(list(piece.shape), list(piece.stride), piece.offset).fill_(True)
    return given if bool(covered.all()) else None
