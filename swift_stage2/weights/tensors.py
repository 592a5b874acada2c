"""Sums tensors on their way to the servers, and says where each lies.

Learner and server take the same checksum on any device: order-sensitive, one pass without large temporaries, and
never a defence against an adversary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from swift_stage2.errors import ProtocolError, ServerFault
from swift_stage2.wire import TensorSpec

_WORD_BYTES = 4
_ROW_WORDS = 1024
_CHUNK_WORDS = 4096 * _ROW_WORDS  # what one thread, or one kernel, sums at a time: 16 MiB
_BLOCK_ROWS = 512  # what stays in a core's cache while it is summed by row and by column
_MOST_THREADS = 16
_BATCH_BYTES = 256 << 20  # at most so much, or one tensor, is copied to be summed
_MODULUS = 1 << 64


def checksum_tensor(tensor: torch.Tensor) -> str:
    """Checksum of the tensor's bytes, dtype and number of bytes, as text.

    Two 64-bit sums over the bytes taken as 32-bit words, one plain and one weighted by position
    (the scheme of J. G. Fletcher, IEEE Trans. Comm. 30(1), 1982, with modulus 2**64 so that integer
    overflow does the reduction). Any single changed word and any swap of unequal words changes it.
    """
    return checksum_tensors([tensor])[0]


def checksum_tensors(tensors: Sequence[torch.Tensor]) -> list[str]:
    """``checksum_tensor`` of each, on the device that holds it; what must be copied for it is bounded.

    Tensors on the CPU are summed by as many threads as the process has cores; a device hands over the sums of some
    hundred MiB at once.
    """
    sums: list[str] = []
    batch: list[torch.Tensor] = []
    for tensor in tensors:
        if batch and (
            tensor.device != batch[0].device
            or sum(each.nbytes for each in batch) + tensor.nbytes > _BATCH_BYTES
        ):
            sums += _checksum_batch(batch)
            batch = []
        batch.append(tensor)
    return sums + _checksum_batch(batch)


def checksums_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """``checksum_tensor`` of each, by its name."""
    return dict(zip(tensors, checksum_tensors(list(tensors.values())), strict=True))


def _checksum_batch(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Of tensors on one device."""
    words = [_words(tensor) for tensor in tensors]
    chunks = [
        (index, start) for index, each in enumerate(words) for start in range(0, each.numel(), _CHUNK_WORDS)
    ]
    pieces = [(words[index][start : start + _CHUNK_WORDS], start) for index, start in chunks]
    parts: Iterable[Sequence[int]] = []
    if pieces and pieces[0][0].device.type != "cpu":
        parts = torch.stack([_sums_on_device(*piece) for piece in pieces]).tolist()
    elif pieces:
        parts = _sum_on_cores(pieces)
    totals = [[0, 0] for _ in words]
    for (index, _), (plain, weighted) in zip(chunks, parts, strict=True):
        totals[index][0] += plain
        totals[index][1] += weighted
    return [
        f"{str(tensor.dtype).removeprefix('torch.')}:{tensor.nbytes}:"
        f"{plain % _MODULUS:016x}:{weighted % _MODULUS:016x}"
        for tensor, (plain, weighted) in zip(tensors, totals, strict=True)
    ]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int32, one dimension, filled up with zeros; a view where that is possible."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # counts as contiguous whatever its stride is, and has no view as bytes then
        flat = flat.as_strided((1,), (1,))
    flat = flat.view(torch.uint8)
    if padding := -flat.numel() % _WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, padding))
    elif flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()  # a view as words must start at one
    return flat.view(torch.int32)


def _sum_on_cores(chunks: Sequence[tuple[torch.Tensor, int]]) -> list[tuple[int, int]]:
    """The sums of chunks on the CPU, each with its start."""
    num_threads = min(len(os.sched_getaffinity(0)), len(chunks), _MOST_THREADS)
    if num_threads < 2 or sum(words.numel() for words, _ in chunks) <= _CHUNK_WORDS:
        return [_sums_on_host(words, start) for words, start in chunks]
    # Threads of Python, because vLLM leaves its workers one thread of torch's; numpy lets go of the GIL.
    with ThreadPoolExecutor(num_threads, "checksum") as pool:
        return list(pool.map(lambda chunk: _sums_on_host(*chunk), chunks))


# Plain and weighted sum of a chunk whose first word has position ``start`` + 1. The position of a word is its row's
# start plus its column, so two sums replace a product per word.
def _sums_on_device(words: torch.Tensor, start: int) -> torch.Tensor:
    rows = torch.nn.functional.pad(words, (0, -words.numel() % _ROW_WORDS)).view(-1, _ROW_WORDS)
    by_row, by_column = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    before = torch.arange(len(by_row), dtype=torch.int64, device=words.device) * _ROW_WORDS + start
    column = torch.arange(1, _ROW_WORDS + 1, dtype=torch.int64, device=words.device)
    return torch.stack([by_row.sum(), (by_row * before).sum() + (by_column * column).sum()])


def _sums_on_host(words: torch.Tensor, start: int) -> tuple[int, int]:
    # numpy widens what it sums in vectors, ten times as fast as torch.
    array = words.numpy()
    in_rows = array.size // _ROW_WORDS * _ROW_WORDS
    rows = array[:in_rows].reshape(-1, _ROW_WORDS)
    by_row = np.empty(len(rows), dtype=np.int64)
    by_column = np.zeros(_ROW_WORDS, dtype=np.int64)
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = rows[first : first + _BLOCK_ROWS]
        np.add.reduce(block, axis=1, dtype=np.int64, out=by_row[first : first + _BLOCK_ROWS])
        by_column += np.add.reduce(block, axis=0, dtype=np.int64)
    rest = array[in_rows:].astype(np.int64)
    before = np.arange(len(rows), dtype=np.int64) * _ROW_WORDS + start
    column = np.arange(1, _ROW_WORDS + 1, dtype=np.int64)
    weighted = (by_row @ before, by_column @ column, rest @ (column[: rest.size] + (start + in_rows)))
    return int(by_row.sum()) + int(rest.sum()), sum(map(int, weighted))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises ProtocolError when there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"dtype must be the name of a torch dtype, got dtype={name!r}")
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    """Bytes that a tensor of that shape and dtype takes."""
    return torch_dtype(spec.dtype).itemsize * math.prod(spec.shape)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; true of integers. A sum shows it, unless the sum itself overflows."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def describe_flat(bucket: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, object]]:
    """Where each of the tensors lies if one lies behind the other.

    The fields are those of ms-swift's ``FlattenedTensorMetadata``; indices are bytes.
    """
    metadata: list[dict[str, object]] = []
    start = 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        metadata.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": end - start,
            }
        )
        start = end
    return metadata


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
    try:
        torch.empty(1, dtype=torch_dtype(own)).to(torch_dtype(wanted))
    except (ProtocolError, RuntimeError):
        return False
    return True
