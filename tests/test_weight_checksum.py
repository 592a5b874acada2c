"""The checksum against an independent sum in Python integers, and against the changes it must show."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2 import weight_checksum
from swift_stage2.weight_checksum import checksum_tensor


def expected_checksum(data: bytes, dtype: str) -> str:
    padded = data + bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(padded) // 4}i", padded)
    plain = sum(words) % 2**64
    weighted = sum(position * word for position, word in enumerate(words, start=1)) % 2**64
    return f"{dtype}:{len(data)}:{plain:016x}:{weighted:016x}"


@given(data=st.binary(min_size=1, max_size=200))
def test_it_is_the_sum_that_its_docstring_describes(data: bytes) -> None:
    assert checksum_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == expected_checksum(
        data, "uint8"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_every_dtype_is_read_as_its_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(35) - 11).to(dtype).reshape(5, 7)
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert checksum_tensor(tensor) == expected_checksum(data, str(dtype).removeprefix("torch."))


@given(data=st.binary(min_size=4, max_size=64), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_it(data: bytes, bit: int) -> None:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    first, second = (torch.frombuffer(bytearray(raw), dtype=torch.uint8) for raw in (data, changed))
    assert checksum_tensor(first) != checksum_tensor(second)


def test_a_swap_of_two_elements_changes_it() -> None:
    assert checksum_tensor(torch.tensor([1.0, 2.0, 3.0])) != checksum_tensor(torch.tensor([2.0, 1.0, 3.0]))


def test_the_dtype_is_part_of_it_and_the_layout_in_memory_is_not() -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    assert checksum_tensor(tensor) != checksum_tensor(tensor.view(torch.float32))
    matrix = torch.arange(6.0).reshape(2, 3)
    assert checksum_tensor(matrix.t().contiguous().t()) == checksum_tensor(matrix)


def test_long_tensors_are_summed_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = checksum_tensor(tensor)
    monkeypatch.setattr(weight_checksum, "_CHUNK_WORDS", 7)
    assert checksum_tensor(tensor) == whole


def test_nan_bits_and_signed_zeros_count() -> None:
    assert checksum_tensor(torch.tensor([0.0])) != checksum_tensor(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum_tensor(quiet) != checksum_tensor(payload)
    assert checksum_tensor(quiet) == checksum_tensor(quiet.clone())


def test_an_empty_tensor_has_one() -> None:
    assert checksum_tensor(torch.empty(0, 3)) == f"float32:0:{0:016x}:{0:016x}"
