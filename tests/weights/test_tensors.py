"""The checksum against an independent sum in Python integers, and against the changes it must show."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.weights import tensors
from swift_stage2.weights.tensors import (
    all_finite,
    checksum_tensor,
    checksum_tensors,
)


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


def test_a_tensor_that_begins_between_two_words_is_summed_like_its_copy() -> None:
    """Behind a tensor with an odd number of two-byte elements, in a bucket or in DeepSpeed's flat buffers."""
    flat = torch.arange(12, dtype=torch.bfloat16)
    for view in (flat[1:5], flat[1:6]):
        assert checksum_tensor(view) == checksum_tensor(view.clone())


@given(data=st.binary(min_size=1, max_size=2000))
def test_long_tensors_are_summed_in_blocks_with_the_same_result(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_ROW_WORDS", 8)
        patch.setattr(tensors, "_BLOCK_ROWS", 2)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert checksum_tensor(tensor) == expected_checksum(data, "uint8")


def test_a_tensor_longer_than_one_piece_at_full_size() -> None:
    tensor = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    data = tensor.numpy().tobytes()
    assert checksum_tensor(tensor) == expected_checksum(data, "float32")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found(bad: float) -> None:
    tensor = torch.ones(100)
    tensor[42] = bad
    assert not all_finite(tensor)
    tensor[43] = -bad  # two infinities cancel to NaN, not to a number
    assert not all_finite(tensor)


def test_finite_elements_whose_sum_overflows_are_finite() -> None:
    assert all_finite(torch.full((4,), torch.finfo(torch.float32).max))
    assert all_finite(torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16))
    assert all_finite(torch.arange(3))


def test_a_device_sums_as_the_host_does() -> None:
    """The kernels that a GPU runs, here on the CPU; ``gpu-check`` compares both on a GPU."""
    words = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int32)
    by_device = [total % 2**64 for total in tensors._sums_on_device(words, 7).tolist()]
    assert by_device == [total % 2**64 for total in tensors._sums_on_host(words, 7)]


def test_many_tensors_are_summed_as_each_alone() -> None:
    """More than are summed without threads, and ``meta`` for a second device, which refuses to be read."""
    large = [torch.arange(3_000_000), torch.arange(0), torch.arange(4)]
    assert checksum_tensors(large) == [checksum_tensor(each) for each in large]
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        checksum_tensors([torch.arange(4), torch.empty(4, device="meta")])
