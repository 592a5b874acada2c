"""What a server takes for offered weights: a learner's memory, a stream, a file on a disk; and what it refuses."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from commands import speaking
from live_server import SharedFile, free_port
from rounds_on_disk import SPECS, offer, prove, snapshot, weights

from swift_stage2.errors import InstallFailed, ProtocolError
from swift_stage2.rollout_server.weight_source import (
    DiskFile,
    WeightSource,
    open_learner_memory,
    require_size,
)
from swift_stage2.runtime.memory import MemoryFile
from swift_stage2.weights.disk_versions import DiskVersions
from swift_stage2.weights.snapshot import ReadSnapshot, SnapshotFile
from swift_stage2.weights.stream import WeightListener, connect_stream
from swift_stage2.weights.tensors import checksums_by_name
from swift_stage2.wire import TensorSpec, WeightOffer

WAIT_S = 60.0
NOBODY_LEAVES = threading.Event()
LEARNER = """
import time
from rounds_on_disk import snapshot
learner = snapshot()
print(learner.file.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def learner() -> SnapshotFile:
    return snapshot()


@pytest.fixture
def file(learner: SnapshotFile) -> Iterator[SharedFile]:
    file = SharedFile(bytes(learner.file.memory))
    yield file
    file.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With one round, ``run-1``."""
    root = tmp_path / "root"
    root.mkdir()
    prove(DiskVersions(root, keep=2), 1)
    return root


def mapped(path: str, wanted: WeightOffer) -> WeightSource:
    return WeightSource(wanted, open_learner_memory(path))


def require_whole(arrived: WeightSource) -> None:
    arrived.collect(WAIT_S, NOBODY_LEAVES)
    assert list(arrived.tensors) != list(weights()), "they come in the file's order"
    assert arrived.tensors.keys() == weights().keys()
    assert all(torch.equal(arrived.tensors[name], tensor) for name, tensor in weights().items())
    arrived.require(checksums_by_name(arrived.tensors))
    path, lent = arrived.lend()
    with lent:
        assert torch.equal(ReadSnapshot.open(path).tensors["wide"], weights()["wide"])


# --- a learner's memory ------------------------------------------------------------------------------


def test_memory_is_read_where_it_lies_and_the_mapping_ends_with_the_offer(file: SharedFile) -> None:
    source = mapped(file.file.path, offer())
    require_whole(source)
    assert file.num_mapped == 1
    source.close()
    source.close()
    with pytest.raises(InstallFailed, match="has ended"):
        source.lend()
    assert source.join(0.0)
    assert file.num_mapped == 0
    with pytest.raises(InstallFailed, match="has ended"):
        source.collect(0.0, NOBODY_LEAVES)


def test_memory_of_another_process_stays_after_its_death() -> None:
    with speaking("-c", LEARNER) as (process, path):
        source = mapped(path, offer())
        process.kill()
        process.wait(WAIT_S)
    require_whole(source)
    with pytest.raises(OSError, match="No such file"):
        mapped(path, offer())
    source.close()


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
def test_no_other_path_is_looked_at(
    learner: SnapshotFile, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("nothing may be opened"))
    with pytest.raises(OSError, match="path must be"):
        open_learner_memory(path.format(pid=os.getpid(), fd=learner.file.fd))


def test_a_descriptor_of_anything_else_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifo would hold its reader up, a device may act on being opened, a file is somebody's secret."""
    for name in ("memfd:swift-stage2-x", "secret", "memfd:swift-stage2-gone"):
        (tmp_path / name).write_bytes(bytes(24))
    os.mkfifo(tmp_path / "fifo")
    names = ("memfd:swift-stage2-x", "secret", "memfd:swift-stage2-gone")
    held = [
        *(os.open(tmp_path / name, os.O_RDONLY) for name in names),
        os.open(tmp_path / "fifo", os.O_RDWR),
        os.open("/dev/zero", os.O_RDONLY),
        os.open(tmp_path, os.O_RDONLY),
        os.memfd_create("another-program's"),
        *os.pipe(),
    ]
    (tmp_path / "memfd:swift-stage2-gone").unlink()
    opened: list[int] = []
    really_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: opened.append(flags) or really_open(path, flags, *rest)
    )
    for fd in held:
        with pytest.raises(OSError, match="must be a learner's memory file"):
            open_learner_memory(f"/proc/{os.getpid()}/fd/{fd}")
        os.close(fd)
    assert all(flags & os.O_PATH for flags in opened)


def test_memory_that_its_learner_can_cut_is_never_mapped(learner: SnapshotFile) -> None:
    """Whoever read behind its new end would be killed by SIGBUS."""
    fd = os.memfd_create("swift-stage2-snapshot", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, learner.file.memory, 0)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="must be sealed against being cut"):
        mapped(f"/proc/{os.getpid()}/fd/{fd}", offer())
    assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(fd)


def test_memory_of_another_user_is_for_root_alone(
    learner: SnapshotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.stat(learner.file.fd).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OSError, match="of the server's own user"):
        open_learner_memory(learner.file.path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    open_learner_memory(learner.file.path).close()


def other_specs() -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(each.name, each.shape, "int32" if each.name == "scalar" else each.dtype) for each in SPECS
    )


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (offer(2), "must be version 2 of run run, got version=1 run_id='run'"),
        (offer(run_id="other"), "must be version 1 of run other, got version=1 run_id='run'"),
        (offer(specs=SPECS[1:]), "num_differences=1: odd"),
        (offer(specs=other_specs()), "num_differences=1: scalar"),
    ],
)
def test_weights_of_anything_but_the_offer_are_refused(
    learner: SnapshotFile, wanted: WeightOffer, told: str
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match=told):
        mapped(learner.file.path, wanted)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_flipped_bit_is_told_with_the_tensors_name(learner: SnapshotFile) -> None:
    learner.tensors["wide"].view(torch.uint8)[3, 4] ^= 1
    arrived = mapped(learner.file.path, offer())
    with pytest.raises(InstallFailed, match="num_differences=1: wide with other checksums"):
        arrived.require(checksums_by_name(arrived.tensors))
    arrived.close()


# --- a stream, and a disk ----------------------------------------------------------------------------


@contextmanager
def receiving(num_bytes: int) -> Iterator[tuple[WeightSource, WeightListener, int, MemoryFile]]:
    port, memory = free_port(), MemoryFile("weights", num_bytes)
    end = WeightListener("127.0.0.1", port)
    source = WeightSource(offer(), memory.reopened(), memory.memory, end)
    yield source, end, port, memory
    source.close()
    assert source.join(WAIT_S)
    socket.create_server(("127.0.0.1", port)).close()  # the port is free again
    assert memory.memory.nbytes == num_bytes


def test_a_stream_fills_the_servers_own_memory(learner: SnapshotFile) -> None:
    num_bytes = learner.file.num_bytes
    with receiving(num_bytes) as (source, end, port, memory):
        with closing(connect_stream("127.0.0.1", port, end.secret, WAIT_S)) as stream:
            stream.send(learner.file.memory, WAIT_S)
        require_whole(source)
        assert memory.memory == learner.file.memory


def test_what_does_not_come_by_a_stream_is_told(learner: SnapshotFile) -> None:
    gone = threading.Event()
    gone.set()
    with receiving(learner.file.num_bytes) as (source, end, port, _):
        with pytest.raises(InstallFailed, match=r"did not arrive: timeout_s=0\.1 is over"):
            source.collect(0.05, NOBODY_LEAVES)
        with pytest.raises(InstallFailed, match="the caller has gone"):
            source.collect(WAIT_S, gone)
        with closing(connect_stream("127.0.0.1", port, end.secret, WAIT_S)) as stream:
            stream._connection.sendall(learner.file.memory[:5000])
        with pytest.raises(InstallFailed, match="ConnectionResetError: the peer has closed"):
            source.collect(WAIT_S, NOBODY_LEAVES)
    with receiving(learner.file.num_bytes) as (source, *_):
        source.close()
        with pytest.raises(InstallFailed, match="the offer has ended"):
            source.collect(WAIT_S, NOBODY_LEAVES)


@pytest.mark.parametrize("spare", [-9000, 100_000_001])
def test_no_memory_is_taken_for_what_cannot_be_the_offered_snapshot(
    learner: SnapshotFile, spare: int
) -> None:
    require_size(learner.file.num_bytes, SPECS)
    with pytest.raises(ProtocolError, match="bytes of tensors and at most"):
        require_size(learner.num_bytes + spare, SPECS)


def read(root: Path, name: str = "run-1") -> WeightSource:
    file = DiskFile(root, name)
    memory = MemoryFile("weights", file.num_bytes)
    source = WeightSource(offer(), memory.reopened(), memory.memory, file)
    try:
        source.collect(WAIT_S, NOBODY_LEAVES)
    except InstallFailed:
        source.close()
        raise
    return source


@pytest.mark.parametrize("is_proven", [True, False])
def test_a_file_is_read_before_its_proof_and_after(root: Path, is_proven: bool) -> None:
    if not is_proven:
        (root / "run-1.safetensors").rename(root / ".run-1.safetensors")
    arrived = read(root)
    os.truncate(next(root.iterdir()), 10)  # what was read is not the disk's any more
    require_whole(arrived)
    arrived.close()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[1] / "elsewhere"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_other(path: Path) -> None:
    path.write_bytes(snapshot(7).file.memory)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a cut file": (cut, "a snapshot must be a safetensors file"),
    "a header that is none": (lambda path: flip(path, 7), "a snapshot must be a safetensors file"),
    "a missing file": (Path.unlink, "No such file or directory"),
    "a file elsewhere": (replace_by_link, "symbolic links"),
    "a pipe": (replace_by_pipe, "must be a regular file"),
    "another version's": (
        replace_by_other,
        "must be version 1 of run run, got version=7 run_id='run'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_file_is_told(root: Path, name: str) -> None:
    fault, told = FAULTS[name]
    fault(root / "run-1.safetensors")
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InstallFailed, match=told):
        read(root)
    assert len(os.listdir("/proc/self/fd")) <= num_open


@pytest.mark.parametrize(
    "name", ["..", "", "../root/run-1", "run-1/", "/etc", ".run-1", "a\0b", "run-1\n", "ı"]
)
def test_no_other_name_is_looked_at(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("nothing may be opened"))
    with pytest.raises(InstallFailed, match="must be named by letters"):
        DiskFile(root, name)


def test_a_file_that_is_cut_while_it_is_read_and_an_offer_that_ends_are_told(root: Path) -> None:
    file = DiskFile(root, "run-1")
    os.truncate(root / "run-1.safetensors", 5000)
    with pytest.raises(OSError, match=r"'run-1' in --weights-root .* is cut"):
        file.receive(memoryview(bytearray(file.num_bytes)), WAIT_S)
    for is_closed, timeout_s in ((True, WAIT_S), (False, -1.0)):
        file = DiskFile(root, "run-1")
        if is_closed:
            file.close()
        with pytest.raises(TimeoutError):
            file.receive(memoryview(bytearray(100)), timeout_s)
