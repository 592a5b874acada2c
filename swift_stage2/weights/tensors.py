"""Sums, packs and buckets tensors on their way to the servers.

Learner and server take the same checksum on any device: order-sensitive, one pass without large temporaries, and
never a defence against an adversary. A bucket is packed once for each set of dtypes that servers hold.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from swift_stage2.errors import ServerFault
from swift_stage2.servers.protocol import TensorSpec

_WORD_BYTES = 4
_ROW_WORDS = 1024
_CHUNK_ROWS = 4096


def checksum_tensor(tensor: torch.Tensor) -> str:
    """Checksum of the tensor's bytes, dtype and number of bytes, as text.

    Two 64-bit sums over the bytes taken as 32-bit words, one plain and one weighted by position
    (the scheme of J. G. Fletcher, IEEE Trans. Comm. 30(1), 1982, with modulus 2**64 so that integer
    overflow does the reduction). Any single changed word and any swap of unequal words changes it.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # counts as contiguous whatever its stride is, and has no view as bytes then
        flat = flat.as_strided((1,), (1,))
    flat = flat.view(torch.uint8)
    padding = -flat.numel() % _WORD_BYTES
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    elif flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()  # a view as words must start at one
    words = flat.view(torch.int32)
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros((), dtype=torch.int64, device=words.device)
    in_rows = words.numel() // _ROW_WORDS * _ROW_WORDS
    column = torch.arange(1, _ROW_WORDS + 1, dtype=torch.int64, device=words.device)
    for start in range(0, in_rows, _ROW_WORDS * _CHUNK_ROWS):
        rows = words[start : min(start + _ROW_WORDS * _CHUNK_ROWS, in_rows)].view(-1, _ROW_WORDS)
        # The position of a word is its row's start plus its column, so two sums replace a product per word.
        by_row, by_column = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
        row_start = torch.arange(len(by_row), dtype=torch.int64, device=words.device) * _ROW_WORDS + start
        plain += by_column.sum()
        weighted += (by_row * row_start).sum() + (by_column * column).sum()
    rest = words[in_rows:].to(torch.int64)
    plain += rest.sum()
    weighted += (rest * (in_rows + column[: rest.numel()])).sum()
    num_bytes = flat.numel() - padding
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}:{num_bytes}:{_unsigned(plain):016x}:{_unsigned(weighted):016x}"


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; true of integers. A sum shows it, unless the sum itself overflows."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _unsigned(total: torch.Tensor) -> int:
    return int(total.item()) & 0xFFFF_FFFF_FFFF_FFFF


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


def flatten(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[dict[str, object]]]:
    """One uint8 tensor holding a bucket's bytes, and where each tensor lies in it.

    The metadata has the fields of ms-swift's ``FlattenedTensorMetadata``; indices are bytes.
    """
    chunks = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
    metadata: list[dict[str, object]] = []
    start = 0
    for (name, tensor), chunk in zip(bucket, chunks, strict=True):
        end = start + chunk.numel()
        metadata.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": chunk.numel(),
            }
        )
        start = end
    return torch.cat(chunks), metadata


def agreed_manifest(own: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The learner's names and shapes with the server's dtypes, or a fault that names the differences."""
    shapes = {spec.name: spec.shape for spec in own}
    wanted = {spec.name: spec.shape for spec in theirs}
    differences = [
        f"{name}: learner {shapes.get(name)} server {wanted.get(name)}"
        for name in sorted(shapes.keys() | wanted.keys())
        if shapes.get(name) != wanted.get(name)
    ]
    if differences:
        shown = "; ".join(differences[:3])
        raise ServerFault(
            f"server and learner must hold the same tensors, got num_differences={len(differences)} ({shown}); "
            "start the server with the learner's model"
        )
    dtypes = {spec.name: spec.dtype for spec in theirs}
    for spec in own:
        if not _can_become(spec.dtype, dtypes[spec.name]):
            raise ServerFault(
                f"server and learner must hold dtypes that can be cast, got {spec.name}: learner {spec.dtype} "
                f"server {dtypes[spec.name]}; start the server with the learner's model and torch_dtype"
            )
    return tuple(TensorSpec(spec.name, spec.shape, dtypes[spec.name]) for spec in own)


@lru_cache(maxsize=64)
def _can_become(own: str, wanted: str) -> bool:
    """Whether a tensor of the learner's dtype can be cast to what a server calls its own."""
    dtype = getattr(torch, wanted, None)
    if not isinstance(dtype, torch.dtype):
        return False
    try:
        torch.empty(1, dtype=getattr(torch, own)).to(dtype)
    except RuntimeError:
        return False
    return True
