"""Turns a tensor into a short checksum that both sides of a push can compute on any device.

Order-sensitive, cheap on a GPU, and free of third-party state; used by the weight sync and by our
server, never as a defence against an adversary.
"""

from __future__ import annotations

import torch

_CHUNK_WORDS = 1 << 22


def checksum_tensor(tensor: torch.Tensor) -> str:
    """Checksum of the tensor's bytes, dtype and number of bytes, as text.

    Two 64-bit sums over the bytes taken as 32-bit words, one plain and one weighted by position
    (the scheme of J. G. Fletcher, IEEE Trans. Comm. 30(1), 1982, with modulus 2**64 so that integer
    overflow does the reduction). Any single changed word and any swap of unequal words changes it.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -flat.numel() % 4
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    words = flat.view(torch.int32)
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        position = torch.arange(start + 1, start + 1 + chunk.numel(), dtype=torch.int64, device=words.device)
        plain += chunk.sum()
        weighted += (chunk * position).sum()
    num_bytes = flat.numel() - padding
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}:{num_bytes}:{_unsigned(plain):016x}:{_unsigned(weighted):016x}"


def _unsigned(total: torch.Tensor) -> int:
    return int(total.item()) & 0xFFFF_FFFF_FFFF_FFFF
