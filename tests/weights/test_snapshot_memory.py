"""The memory file of a snapshot: another process reads it in place, has room or says so, and is given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from swift_stage2.errors import WeightSyncError
from swift_stage2.weights import snapshot_memory
from swift_stage2.weights.snapshot import CastMemory, Snapshot
from swift_stage2.weights.snapshot_memory import MappedMemory, SnapshotMemory
from swift_stage2.wire import MEMORY_PREFIX, MEMORY_TOKEN_BYTES, LearnerMemory, TensorSpec

MANIFEST = (
    TensorSpec("a", (2, 3), "bfloat16"),
    TensorSpec("b", (5,), "float32"),
    TensorSpec("c", (), "int8"),
)
TENSORS = (
    ("a", torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)),
    ("b", torch.arange(5.0) - 2.5),
    ("c", torch.tensor(7, dtype=torch.int8)),
)
NUM_BYTES = 12 + 20 + 1
_OTHER_PROCESS = """
import json, sys
from swift_stage2.wire import LearnerMemory, TensorSpec
from swift_stage2.weights.snapshot import CastMemory, Snapshot
from swift_stage2.weights.snapshot_memory import MappedMemory

manifest = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in json.loads(sys.argv[1])]
where = LearnerMemory.from_json(json.loads(sys.argv[2]))
snapshot = Snapshot(manifest, MappedMemory(where))
with open(where.path, "rb") as file:
    token = file.read()[-16:].hex()
for _ in range(2):
    (bucket,) = snapshot.buckets(1 << 20)
    packed = bucket.pack({}, CastMemory())
    print(json.dumps([packed.flat.tolist(), packed.checksums, token, snapshot.memory.dtypes]), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    with closing(SnapshotMemory()) as memory:
        yield memory


def test_another_process_reads_every_rounds_bytes_and_the_token_in_place(memory: SnapshotMemory) -> None:
    snapshot = Snapshot(MANIFEST, memory)
    snapshot.put(TENSORS)
    where = memory.where
    assert where.num_bytes == NUM_BYTES + MEMORY_TOKEN_BYTES
    assert where.path.startswith(f"/proc/{os.getpid()}/fd/")
    assert os.readlink(where.path).startswith(f"/memfd:{MEMORY_PREFIX}")
    manifest = json.dumps([(spec.name, spec.shape, spec.dtype) for spec in MANIFEST])
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, manifest, json.dumps(where.to_json())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        for _ in range(2):
            flat, checksums, token, dtypes = json.loads(other.stdout.readline())
            (bucket,) = snapshot.buckets(1 << 20)
            packed = bucket.pack({}, CastMemory())
            assert (flat, checksums) == (packed.flat.tolist(), packed.checksums)
            assert token == where.token
            assert dtypes == {spec.name: spec.dtype for spec in MANIFEST}
            snapshot.put((name, tensor + 1) for name, tensor in TENSORS)
            other.stdin.write(b"go on\n")
            other.stdin.flush()
        assert other.wait(60) == 0


def test_no_room_is_told_with_both_numbers_before_anything_is_allocated(
    memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_memory, "available_memory_bytes", lambda: 2_500_000_000)
    with pytest.raises(WeightSyncError, match=r"got 4\.0 GB of weights and 2\.5 GB available"):
        memory.allocate(4_000_000_000, {})
    assert memory.where == LearnerMemory("", 0, "")


def test_memory_that_the_kernel_refuses_is_told_and_not_a_crash_at_the_first_write(
    memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        WeightSyncError, match=r"copy of the weights got no memory: .*No space left on device"
    ):
        Snapshot(MANIFEST, memory)


def test_the_pages_are_given_back_once_the_last_one_lets_go_of_them() -> None:
    """Who has mapped the file before keeps what is there; nobody new gets in."""
    num_bytes, process = 64 << 20, psutil.Process()
    memory = SnapshotMemory()
    flat = memory.allocate(num_bytes, {})
    flat.fill_(1)
    reader = MappedMemory(memory.where)
    mapped = reader.allocate(num_bytes, {})
    assert mapped.sum(dtype=torch.int64).item() == num_bytes
    held = process.memory_info().shared
    path = memory.where.path
    inode = os.stat(path).st_ino
    memory.close()
    memory.close()
    assert not Path(path).exists()
    with pytest.raises(FileNotFoundError):
        MappedMemory(memory.where).allocate(num_bytes, {})
    del flat
    assert mapped[-1].item() == 1
    assert num_mappings(inode) == 1
    del mapped
    reader.close()
    assert num_mappings(inode) == 0
    assert process.memory_info().shared < held - num_bytes // 2


def num_mappings(inode: int) -> int:
    """Of that file, in this process."""
    return sum(int(line.split()[4]) == inode for line in Path("/proc/self/maps").read_text().splitlines())
