"""Tensors through anonymous memory, into a process that is not a child of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swift_stage2.rollout_server.vllm_weights import SharedStaging, open_staged
from swift_stage2.weights.checksum import checksum_tensor

READER = """
import json, sys
from swift_stage2.rollout_server.vllm_weights import open_staged
from swift_stage2.weights.checksum import checksum_tensor
path, num_bytes, layout = json.loads(sys.argv[1])
tensors = open_staged(path, num_bytes, layout)
print(json.dumps({name: [list(t.shape), checksum_tensor(t)] for name, t in tensors.items()}))
"""


def make_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(5, 3),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "numbers": torch.arange(9).reshape(3, 3).t(),  # not contiguous
    }


def test_another_process_reads_what_was_put_in() -> None:
    import json

    weights = make_weights()
    staging = SharedStaging()
    staged = staging.put(weights)
    argument = json.dumps([staged.path, staged.num_bytes, staged.layout])
    reply = subprocess.run(
        [sys.executable, "-c", READER, argument], capture_output=True, text=True, timeout=60, check=True
    )
    expected = {name: [list(t.shape), checksum_tensor(t)] for name, t in weights.items()}
    assert json.loads(reply.stdout) == expected
    staging.close()


def test_a_reader_sees_the_next_round_and_writes_for_itself_only() -> None:
    staging = SharedStaging()
    first = staging.put(make_weights(1))
    seen = open_staged(first.path, first.num_bytes, first.layout)
    seen["a"].zero_()
    again = open_staged(first.path, first.num_bytes, first.layout)
    assert torch.equal(again["a"], make_weights(1)["a"])
    del seen, again
    weights = {"other": torch.randn(1000)}
    second = staging.put(weights)
    assert second.path == first.path
    opened = open_staged(second.path, second.num_bytes, second.layout)
    assert torch.equal(opened["other"], weights["other"])
    staging.close()


def test_it_has_no_name_and_is_gone_when_it_is_closed() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    staging = SharedStaging()
    staged = staging.put(make_weights())
    assert not {
        name for name in {path.name for path in Path("/dev/shm").iterdir()} - before if "swift" in name
    }
    staging.close()
    staging.close()
    with pytest.raises(OSError, match="No such file"):
        open_staged(staged.path, staged.num_bytes, staged.layout)
