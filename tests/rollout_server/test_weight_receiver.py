"""The receiver against a real learner's end of a stream."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from flat_bucket import flatten
from live_server import free_port

from swift_stage2.errors import ProtocolError, RoundFailed
from swift_stage2.rollout_server.staging import StagingBuffers
from swift_stage2.rollout_server.weight_receiver import Bucket, BucketEntry, WeightReceiver
from swift_stage2.weights.stream import WeightStream, connect_stream
from swift_stage2.weights.tensors import checksum_tensor
from swift_stage2.wire import TensorSpec

TIMEOUT_S = 60.0
NOBODY_LEAVES = threading.Event()


def bucket(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Bucket]:
    flat, metadata = flatten(list(tensors.items()))
    entries = [
        BucketEntry(
            TensorSpec.from_json(item),
            int(item["start_idx"]),  # type: ignore[call-overload]
            int(item["end_idx"]),  # type: ignore[call-overload]
        )
        for item in metadata
    ]
    return flat, Bucket.from_entries(entries)


@pytest.fixture
def staging() -> StagingBuffers:
    return StagingBuffers()


@pytest.fixture
def ends(staging: StagingBuffers) -> Iterator[tuple[WeightReceiver, WeightStream]]:
    port = free_port()
    receiver = WeightReceiver("127.0.0.1", port, TIMEOUT_S, staging)
    learner = connect_stream("127.0.0.1", port, receiver.start(), TIMEOUT_S)
    yield receiver, learner
    learner.close()
    receiver.close()
    assert receiver.join(TIMEOUT_S)
    socket.create_server(("127.0.0.1", port)).close()  # the port is free again


def test_tensors_of_all_dtypes_arrive_bit_by_bit(ends: tuple[WeightReceiver, WeightStream]) -> None:
    receiver, learner = ends
    first = {
        "byte": torch.arange(3, dtype=torch.uint8),  # shifts what follows off its alignment
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "full": torch.randn(2, 2, 2),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }
    second = {"nan": torch.tensor([1.0, float("nan")]), "fine": torch.ones(4, dtype=torch.float64)}
    third = {"gate": torch.ones(1).to(torch.bfloat16), "behind it": torch.randn(4, 2).to(torch.bfloat16)}
    for tensors in (first, second, third):
        flat, layout = bucket(tensors)
        receiver.expect(layout)
        learner.send(flat, TIMEOUT_S)
    received = receiver.collect(TIMEOUT_S, NOBODY_LEAVES)
    everything = first | second | third
    for name, tensor in everything.items():
        assert received.tensors[name].dtype == tensor.dtype
        assert checksum_tensor(received.tensors[name]) == checksum_tensor(tensor)
        assert torch.equal(received.tensors[name].nan_to_num(), tensor.nan_to_num())
    assert received.non_finite == ("nan",)


def test_collecting_has_a_deadline(ends: tuple[WeightReceiver, WeightStream]) -> None:
    receiver, _ = ends
    receiver.expect(bucket({"a": torch.ones(8)})[1])
    with pytest.raises(RoundFailed, match="0 of 1 buckets"):
        receiver.collect(0.05, NOBODY_LEAVES)


@pytest.mark.parametrize(("start", "end"), [(1, 5), (0, 5), (0, 3), (-4, 0)])
def test_a_layout_that_does_not_fit_is_refused(start: int, end: int) -> None:
    with pytest.raises(ProtocolError, match="byte by byte"):
        Bucket.from_entries([BucketEntry(TensorSpec("a", (1,), "float32"), start, end)])
