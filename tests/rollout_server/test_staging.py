"""Memory of a round's buckets: kept, moved, and read by another process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import run_python

from swift_stage2.rollout_server.staging import SharedStaging, open_staged
from swift_stage2.weights.tensors import checksum_tensor

READER = """
import json, sys
from swift_stage2.rollout_server.staging import open_staged
from swift_stage2.weights.tensors import checksum_tensor
path, num_bytes, layout = json.loads(sys.argv[1])
tensors = open_staged(path, num_bytes, layout)
print(json.dumps({name: [list(t.shape), checksum_tensor(t)] for name, t in tensors.items()}))
"""


def odd_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(5, 3),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "numbers": torch.arange(9).reshape(3, 3).t(),  # not contiguous
    }


def test_another_process_reads_what_was_put_in() -> None:
    weights = odd_weights()
    staging = SharedStaging()
    staged = staging.stage(weights)
    argument = json.dumps([staged.path, staged.num_bytes, staged.layout])
    reply = run_python("-c", READER, argument, check=True)
    expected = {name: [list(t.shape), checksum_tensor(t)] for name, t in weights.items()}
    assert json.loads(reply.stdout) == expected
    staging.close()


def test_it_has_no_name_and_is_gone_when_it_is_closed() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    staging = SharedStaging()
    staged = staging.stage(odd_weights())
    assert not {
        name for name in {path.name for path in Path("/dev/shm").iterdir()} - before if "swift" in name
    }
    staging.close()
    staging.close()
    with pytest.raises(OSError, match="No such file"):
        open_staged(staged.path, staged.num_bytes, staged.layout)


def test_what_was_received_is_read_by_another_where_it_lies() -> None:
    """Of three buckets the second changes its size, as when a learner with other buckets comes."""
    staging = SharedStaging()
    for sizes in ((8, 4096, 12), (8, 5000, 12)):
        for index, size in enumerate(sizes):
            staging.buffer(index, size).fill_(index + 1)
        buffers = [staging.buffer(index, size) for index, size in enumerate(sizes)]
        weights = {
            "whole": buffers[0].view(torch.int32),
            "part": buffers[1][4:],
            "stray": torch.arange(5),
            "behind": buffers[2].view(torch.float32),
        }
        staged = staging.stage(weights)
        opened = open_staged(staged.path, staged.num_bytes, staged.layout)
        starts = {name: start for name, *_, start in staged.layout}
        assert starts["part"] == 64 + 4, "behind the first buffer, at the next multiple of 64"
        assert starts["behind"] < starts["stray"] < staged.num_bytes
        assert all(torch.equal(opened[name], tensor) for name, tensor in weights.items())
        buffers[0].fill_(9)  # the reader maps this memory; nothing is copied
        assert opened["whole"].view(torch.uint8).eq(9).all()
        del opened
    staging.close()
