"""A batch through shared memory: what comes out is what went in, whatever its tensors look like."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.preprocessing_worker import read_batch, write_batch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


values = st.recursive(
    st.one_of(tensors(), st.none(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner)),
    max_leaves=8,
)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left, right)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@given(batch=st.dictionaries(st.text(max_size=8), values, max_size=5))
def test_a_batch_comes_back_as_it_was(batch: dict[str, Any]) -> None:
    outline, descriptor = write_batch(batch)
    found = read_batch(outline, descriptor)
    assert found.keys() == batch.keys()
    for name in batch:
        assert_same(found[name], batch[name])


def test_tensors_lie_in_the_shared_memory_itself() -> None:
    outline, descriptor = write_batch({"a": torch.zeros(4), "b": torch.zeros(4)})
    other = os.dup(descriptor)
    first, second = read_batch(outline, descriptor), read_batch(outline, other)
    first["b"][2] = 5
    assert second["b"].tolist() == [0, 0, 5, 0]
    assert second["a"].tolist() == [0, 0, 0, 0]


def test_what_cannot_be_shared_is_refused_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="dense tensors in main memory"):
        write_batch({"a": torch.eye(3).to_sparse()})
    assert len(os.listdir("/proc/self/fd")) == before
