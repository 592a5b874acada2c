"""The file of a snapshot: any reader of safetensors and another process read it in place; room, names, ends."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from rounds_on_disk import BUCKET_BYTES, SPECS, identity, weights
from rounds_on_disk import snapshot as make_snapshot
from safetensors.torch import load as load_bytes

from swift_stage2.errors import ProtocolError, WeightSyncError
from swift_stage2.runtime.memory import MEMORY_PREFIX, MemoryFile
from swift_stage2.weights import snapshot as snapshot_module
from swift_stage2.weights.snapshot import ReadSnapshot, SnapshotFile, WeightIdentity
from swift_stage2.weights.tensors import checksum_tensor
from swift_stage2.wire import TensorSpec

_OTHER_PROCESS = """
import json, sys
from swift_stage2.wire import TensorSpec
from swift_stage2.weights.snapshot import ReadSnapshot, SnapshotFile, WeightIdentity

manifest = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in json.loads(sys.argv[1])]
snapshot = SnapshotFile(manifest, bucket_bytes=1, path=sys.argv[2])
for number in (1, 2):
    identity = WeightIdentity("run", number, 10 * number)
    print(json.dumps(snapshot.describe(identity)), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def snapshot() -> SnapshotFile:
    return make_snapshot()


def test_the_memory_is_a_safetensors_file_that_says_whose_weights_it_holds(snapshot: SnapshotFile) -> None:
    expected = weights()
    loaded = load_bytes(bytes(snapshot.file.memory))
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    read = ReadSnapshot.open(snapshot.file.path)
    assert read.identity == WeightIdentity("run", 1, 10)
    assert read.specs() == {spec.name: spec for spec in SPECS}
    assert read.checksums == {name: checksum_tensor(tensor) for name, tensor in expected.items()}
    assert read.differing({"wide": read.checksums["wide"], "odd": "0", "more": "0"}) == ["odd", "more"]
    snapshot.tensors["wide"].zero_()
    assert not read.tensors["wide"].any(), "nothing is copied"
    read.tensors["scalar"].fill_(7)
    assert torch.equal(snapshot.tensors["scalar"], expected["scalar"]), "nor written back"
    assert fcntl.fcntl(snapshot.file.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.truncate(snapshot.file.path, 100)


def test_another_process_describes_every_versions_weights_where_they_lie(snapshot: SnapshotFile) -> None:
    path = snapshot.file.path
    assert path.startswith(f"/proc/{os.getpid()}/fd/")
    assert os.readlink(path).startswith(f"/memfd:{MEMORY_PREFIX}")
    manifest = json.dumps([(spec.name, spec.shape, spec.dtype) for spec in SPECS])
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, manifest, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        for number in (1, 2):
            told = json.loads(other.stdout.readline())
            read = ReadSnapshot.open(path)
            assert read.identity == identity(number)
            assert (
                told == read.checksums == {name: checksum_tensor(each) for name, each in read.tensors.items()}
            )
            assert all(torch.equal(read.tensors[name], each) for name, each in weights(number).items())
            snapshot.put(weights(2).items())
            other.stdin.write(b"go on\n")
            other.stdin.flush()
        assert other.wait(60) == 0


@pytest.mark.parametrize(
    "content", [b"", bytes(100), b"\x02\0\0\0\0\0\0\0{}", (2**60).to_bytes(8, "little") + b"{}"]
)
def test_what_is_no_snapshot_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises((ProtocolError, OSError)):
        ReadSnapshot.open(str(path))


def test_no_room_is_told_with_both_numbers_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_module, "available_memory_bytes", lambda: 2_500_000_000)
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("it must not be allocated"))
    with pytest.raises(WeightSyncError, match=r"got 4\.0 GB of weights and 2\.5 GB available"):
        SnapshotFile([TensorSpec("a", (10**9,), "float32")], bucket_bytes=1)


def test_memory_that_the_kernel_refuses_is_told_and_not_a_crash_at_the_first_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        SnapshotFile(SPECS, bucket_bytes=BUCKET_BYTES)


def test_the_pages_are_given_back_once_the_last_one_lets_go_of_them() -> None:
    """Who has mapped the file before keeps what is there; nobody new gets in."""
    num_bytes, process = 64 << 20, psutil.Process()
    owner = MemoryFile("test", num_bytes)
    owner.memory[:] = b"\1" * num_bytes
    reader = MemoryFile.open(owner.path)
    assert sum(reader.memory[:: 1 << 12]) == num_bytes >> 12
    held = process.memory_info().shared
    path = owner.path
    owner.close()
    owner.close()
    assert not Path(path).exists()
    with pytest.raises(FileNotFoundError):
        MemoryFile.open(path)
    del owner
    assert reader.memory[-1] == 1
    reader.close()
    del reader
    assert process.memory_info().shared < held - num_bytes // 2


def test_tensors_of_all_item_sizes_lie_in_buckets_where_their_views_may_begin() -> None:
    for max_bytes, num_buckets in ((1, 5), (10, 4), (1 << 20, 1)):
        snapshot = SnapshotFile(SPECS, bucket_bytes=max_bytes)
        snapshot.put(weights().items())
        assert snapshot.num_bytes == sum(tensor.nbytes for tensor in weights().values())
        assert len(snapshot.buckets) == num_buckets
        found = {}
        for bucket in snapshot.buckets:
            for entry in bucket.metadata:
                piece = bytearray(bytes(bucket.flat.tolist())[entry["start_idx"] : entry["end_idx"]])  # type: ignore[misc]
                dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."))
                flat = torch.frombuffer(piece, dtype=dtype) if piece else torch.empty(0, dtype=dtype)
                found[entry["name"]] = flat.reshape(entry["shape"])  # type: ignore[call-overload]
        assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())
    assert SnapshotFile((), bucket_bytes=1).buckets == ()
