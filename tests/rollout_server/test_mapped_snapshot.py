"""Whose memory a server maps, and how long: files of this and of another process, and paths that lead elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_server import SharedFile

from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.mapped_snapshot import MappedSnapshot
from swift_stage2.rollout_server.weight_receiver import Bucket, BucketEntry
from swift_stage2.wire import LearnerMemory, TensorSpec

WAIT_S = 60.0
NOBODY_LEAVES = threading.Event()
LEARNER = """
import os, sys
fd = os.memfd_create("swift-stage2-snapshot")
os.write(fd, bytes(range(8)) + bytes.fromhex(sys.argv[1]))
print(f"/proc/{os.getpid()}/fd/{fd}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file() -> Iterator[SharedFile]:
    file = SharedFile(torch.arange(6, dtype=torch.float32).numpy().tobytes())
    yield file
    file.close()


def bucket(name: str, num_floats: int, offset: int | None) -> Bucket:
    spec = TensorSpec(name, (num_floats,), "float32")
    return Bucket.from_entries([BucketEntry(spec, 0, 4 * num_floats)], offset)


def test_tensors_are_views_of_the_file_and_the_mapping_ends_with_the_round(file: SharedFile) -> None:
    snapshot = MappedSnapshot(file.offer)
    snapshot.expect(bucket("last", 2, 16))
    snapshot.expect(bucket("first", 4, 0))
    received = snapshot.collect(0.0, NOBODY_LEAVES)
    assert received.tensors["last"].tolist() == [4.0, 5.0]
    os.pwrite(file.fd, torch.tensor([9.0]).numpy().tobytes(), 4)
    assert received.tensors["first"].tolist() == [0.0, 9.0, 2.0, 3.0]  # nothing is copied
    received.tensors["first"].zero_()
    assert os.pread(file.fd, 4, 4) == torch.tensor([9.0]).numpy().tobytes()  # nor written back
    assert file.num_mapped
    del received
    snapshot.close()
    snapshot.close()
    assert snapshot.join(0.0)
    assert file.num_mapped == 0
    with pytest.raises(RoundFailed, match="has ended"):
        snapshot.collect(0.0, NOBODY_LEAVES)
    with pytest.raises(RoundFailed, match="has ended"):
        snapshot.expect(bucket("first", 4, 0))
    with pytest.raises(RoundFailed, match="has ended"):
        snapshot.lend(["first"])


@pytest.mark.parametrize(("offset", "num_floats"), [(None, 1), (20, 2), (24, 1), (2**62, 1)])
def test_a_bucket_outside_of_the_file_is_refused(
    file: SharedFile, offset: int | None, num_floats: int
) -> None:
    """The token behind the weights is none of them."""
    snapshot = MappedSnapshot(file.offer)
    with pytest.raises(RoundFailed, match=f"must lie in the 24 bytes .* offset={offset}"):
        snapshot.expect(bucket("a", num_floats, offset))
    snapshot.close()


@contextmanager
def another_learner(token: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", LEARNER, token]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def test_memory_of_another_process_stays_after_its_death() -> None:
    with another_learner("ab" * 16) as (path, process):
        snapshot = MappedSnapshot(LearnerMemory(path, 24, "ab" * 16))
        process.kill()
        process.wait(WAIT_S)
        spec = TensorSpec("bytes", (8,), "uint8")
        snapshot.expect(Bucket.from_entries([BucketEntry(spec, 0, 8)], 0))
        assert snapshot.collect(0.0, NOBODY_LEAVES).tensors["bytes"].tolist() == list(range(8))
        with pytest.raises(OSError, match="No such file"):
            MappedSnapshot(LearnerMemory(path, 24, "ab" * 16))
        snapshot.close()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/proc/self/fd/{fd}",
        "/proc/{pid}/fd/{fd}/",
        "/proc/{pid}/fd/../fd/{fd}",
        "/proc/{pid}/task/{pid}/fd/{fd}",
        " /proc/{pid}/fd/{fd}",
        "/proc/{pid}/fd/{fd}\n",
        "/proc/{pid}/fd/\u0661",
        "/dev/shm/x",
        "",
    ],
)
def test_no_other_path_is_looked_at(file: SharedFile, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = replace(file.offer, path=path.format(pid=os.getpid(), fd=file.fd))

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("nothing may be opened")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="path must be"):
        MappedSnapshot(offer)


def test_a_descriptor_of_anything_else_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifo would hold its reader up, a device may act on being opened, a file is somebody's secret."""
    for number, name in enumerate(("memfd:swift-stage2-x", "secret")):
        (tmp_path / name).write_bytes(bytes(24 + number))
    gone = tmp_path / "memfd:swift-stage2-gone"
    gone.write_bytes(bytes(24))
    os.mkfifo(tmp_path / "fifo")
    ends = os.pipe()
    held = [
        os.open(tmp_path / "memfd:swift-stage2-x", os.O_RDONLY),
        os.open(tmp_path / "secret", os.O_RDONLY),
        os.open(gone, os.O_RDONLY),
        os.open(tmp_path / "fifo", os.O_RDWR),
        os.open("/dev/zero", os.O_RDONLY),
        os.open(tmp_path, os.O_RDONLY),
        os.memfd_create("another-program's"),
        *ends,
    ]
    gone.unlink()
    opened: list[int] = []
    really_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: opened.append(flags) or really_open(path, flags, *rest)
    )
    for fd in held:
        with pytest.raises(OSError, match="must be a learner's memory file"):
            MappedSnapshot(LearnerMemory(f"/proc/{os.getpid()}/fd/{fd}", 24, "00" * 16))
    assert all(flags & os.O_PATH for flags in opened)
    for fd in held:
        os.close(fd)


def test_size_token_and_owner_must_be_right(file: SharedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for num_bytes in (file.num_bytes - 1, file.num_bytes + 1, 2**62):
        with pytest.raises(OSError, match=f"must have {num_bytes} bytes, got {file.num_bytes}"):
            MappedSnapshot(replace(file.offer, num_bytes=num_bytes))
    with pytest.raises(OSError, match="the token at the end"):
        MappedSnapshot(replace(file.offer, token="0" * 32))
    with pytest.raises(OSError, match="No such file"):
        MappedSnapshot(replace(file.offer, path=f"/proc/{os.getpid()}/fd/99999"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    owner = os.stat(file.fd).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OSError, match="of the server's own user"):
        MappedSnapshot(file.offer)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    MappedSnapshot(file.offer).close()
