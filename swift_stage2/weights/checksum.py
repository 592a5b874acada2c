"""Cheap looks at a tensor that both sides of a push take on any device: a checksum, and whether all is finite.

The checksum is order-sensitive, one pass without large temporaries, and free of third-party state; used by the
weight sync and by our server, never as a defence against an adversary.
"""

from __future__ import annotations

import torch

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
