"""Shows which weights a model of vLLM holds after a load.

vLLM fuses parameters (q, k and v in one; gate and up in one) and cuts them over ranks, so a parameter's checksum cannot
be compared by name. ``LoadTrace`` records every copy out of the given tensors while the model's own loader runs; read
back, each copy's destination shows the bytes of one piece of one tensor where the model now keeps it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from swift_stage2.errors import InstallFailed
from swift_stage2.rollout_server.engine import InstalledWeights
from swift_stage2.weights.tensors import checksum_tensor, checksum_tensors


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of one tensor (offset, shape and stride count its elements), as given and as held now."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    given: str
    held: str  # checksums


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """Notes the place that a part of one tensor was copied to; keeps neither tensor nor memory alive."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    given: str
    storage: StorageWeakRef
    target: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]  # dtype, offset, shape, stride in it

    def held_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The part as ``storage`` holds it now."""
        dtype, *place = self.target
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies while it is entered. ``drop_copies`` makes the load a load of nothing (a test's fault)."""

    def __init__(self, weights: Mapping[str, torch.Tensor], *, drop_copies: bool = False) -> None:
        """``weights`` are all on one device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = dict(weights)
        self._devices = {tensor.device for tensor in weights.values()}
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

    def parts(self, read: Mapping[str, str] | None = None) -> list[CopiedPart]:
        """Every part that was copied, wherever to, with its checksum as given.

        ``read`` holds the checksums of the given tensors where they are known: one that was copied whole is not
        summed again.
        """
        given = [  # one at a time: each may need a copy of its own
            read[name]
            if read and self._is_whole(name, target, source)
            else checksum_tensor(source.expand(target.shape).to(target.dtype))
            for name, target, source in self._copies
        ]
        return [
            CopiedPart(
                name=name,
                offset=self._offset(name, source),
                shape=tuple(source.shape),
                stride=tuple(source.stride()),
                given=known,
                storage=StorageWeakRef(target.untyped_storage()),  # type: ignore[no-untyped-call]
                target=(
                    target.dtype,
                    int(target.storage_offset()),
                    tuple(target.shape),
                    tuple(target.stride()),
                ),
            )
            for (name, target, source), known in zip(self._copies, given, strict=True)
        ]

    def _offset(self, name: str, source: torch.Tensor) -> int:
        return (source.data_ptr() - self._weights[name].data_ptr()) // source.element_size()

    def _is_whole(self, name: str, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether this copy took all bytes of the given tensor, in the same order and dtype."""
        given = self._weights[name]
        return (
            source.shape == target.shape
            and source.numel() == given.numel()
            and source.dtype == target.dtype == given.dtype
            and source.is_contiguous()
            and given.is_contiguous()
            and self._offset(name, source) == 0
        )

    def _owner(self, source: torch.Tensor) -> str | None:
        """The given tensor that ``source`` is a view of."""
        if not isinstance(source, torch.Tensor) or source.device not in self._devices or not source.numel():
            return None
        address = source.data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        tensor = self._weights[self._names[index]]
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return self._names[index] if address < end else None


def held_pieces(parts: Iterable[CopiedPart], parameters: Iterable[torch.Tensor]) -> list[TensorPiece]:
    """Every part in storage that the model's parameters still use, its checksum taken there now."""
    storages = (parameter.untyped_storage() for parameter in parameters)
    in_use = {storage._cdata: storage for storage in storages}
    kept = [(part, in_use[part.storage.cdata]) for part in parts if part.storage.cdata in in_use]
    held = checksum_tensors([part.held_in(storage) for part, storage in kept])
    return [
        TensorPiece(part.name, part.offset, part.shape, part.stride, part.given, held_sum)
        for (part, _), held_sum in zip(kept, held, strict=True)
    ]


def plain_pieces(pieces: Iterable[TensorPiece]) -> list[list[Any]]:
    """As lists alone, which pass through vLLM's own encoding."""
    return [[list(item) if isinstance(item, tuple) else item for item in astuple(piece)] for piece in pieces]


def reported_pieces(reports: Iterable[Mapping[str, Any]]) -> list[TensorPiece]:
    """The pieces in all workers' reports, which ``plain_pieces`` made into lists."""
    return [
        TensorPiece(name, offset, tuple(shape), tuple(stride), given, held)
        for report in reports
        for name, offset, shape, stride, given, held in report["pieces"]
    ]


def untouched(parts: Iterable[CopiedPart], parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters into whose storage nothing was copied."""
    touched = {part.storage.cdata for part in parts}
    return [
        name
        for name, parameter in parameters.items()
        if parameter.numel() and parameter.untyped_storage()._cdata not in touched
    ]


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
    """One answer of the reports of all workers. Raises InstallFailed when they did not read the same bytes, or none."""
    unreadable = [report["unreadable"] for report in reports if "unreadable" in report]
    if unreadable:
        raise InstallFailed(
            f"vLLM's workers must read the weights, got in {len(unreadable)} of {len(reports)}: {unreadable[0]}",
            torn=len(unreadable) < len(reports),
        )
    read = dict(reports[0]["read"])
    if any(dict(report["read"]) != read for report in reports):
        raise InstallFailed("vLLM's workers read different weights", torn=True)
    pieces = reported_pieces(reports)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    traced = {piece.name for piece in pieces}
    return InstalledWeights(
        loaded=tuple(name for name in weights if name in traced),
        arrived=read,
        resident=resident_checksums(shapes, read, pieces),
    )
