"""Sums tensors on their way to the servers.

Learner and server take the same checksum on any device: order-sensitive, one pass without large temporaries, and
never a defence against an adversary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from swift_stage2.errors import ProtocolError
from swift_stage2.wire import TensorSpec

_WORD_BYTES = 4
_ROW_WORDS = 1024
_CHUNK_WORDS = 4096 * _ROW_WORDS  # what one kernel sums at a time: 16 MiB
_BLOCK_ROWS = 512  # what stays in a core's cache while it is summed by row and by column
_MOST_THREADS = 16
_MODULUS = 1 << 64


def checksum_tensor(tensor: torch.Tensor) -> str:
    """Checksum of the tensor's bytes, dtype and number of bytes, as text.

    Two 64-bit sums over the bytes taken as 32-bit words, one plain and one weighted by position
    (the scheme of J. G. Fletcher, IEEE Trans. Comm. 30(1), 1982, with modulus 2**64 so that integer
    overflow does the reduction). Any single changed word and any swap of unequal words changes it.
    """
    words = _words(tensor)
    if tensor.device.type == "cpu":
        plain, weighted = _sums_on_host(words, 0)
    else:
        pieces = enumerate(words.split(_CHUNK_WORDS))  # type: ignore[no-untyped-call]
        sums = [_sums_on_device(piece, index * _CHUNK_WORDS) for index, piece in pieces]
        plain, weighted = torch.stack(sums).sum(0).tolist()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}:{tensor.nbytes}:{plain % _MODULUS:016x}:{weighted % _MODULUS:016x}"


def checksum_tensors(tensors: Sequence[torch.Tensor]) -> list[str]:
    """``checksum_tensor`` of each, on the device that holds it; those on the CPU by as many threads as there are
    cores."""
    num_threads = min(len(os.sched_getaffinity(0)), len(tensors), _MOST_THREADS)
    is_large = sum(tensor.nbytes for tensor in tensors) > _CHUNK_WORDS * _WORD_BYTES
    if num_threads < 2 or not is_large or any(tensor.device.type != "cpu" for tensor in tensors):
        return [checksum_tensor(tensor) for tensor in tensors]
    # Threads of Python, because vLLM leaves its workers one thread of torch's; numpy lets go of the GIL.
    with ThreadPoolExecutor(num_threads, "checksum") as pool:
        return list(pool.map(checksum_tensor, tensors))


def checksums_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """``checksum_tensor`` of each, by its name."""
    return dict(zip(tensors, checksum_tensors(list(tensors.values())), strict=True))


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


# Plain and weighted sum of words whose first word has position ``start`` + 1. The position of a word is its row's
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


def snapshot_bytes(manifest: Iterable[TensorSpec]) -> int:
    """Bytes of all these tensors."""
    return sum(map(num_bytes, manifest))


def in_buckets(manifest: Iterable[TensorSpec], max_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """The same in buckets of at most ``max_bytes``; a larger tensor goes alone."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in manifest:
        size += num_bytes(spec)
        if not buckets or size > max_bytes:
            buckets.append([])
            size = num_bytes(spec)
        buckets[-1].append(spec)
    return [tuple(bucket) for bucket in buckets]


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; true of integers. A sum shows it, unless the sum itself overflows."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
