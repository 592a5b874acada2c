"""Versions in a directory: written whole or not at all, once for all servers; what stays, and what never counts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rounds_on_disk import WAIT_S, identity, prove, snapshot, store, weights
from safetensors.torch import load_file
from small_disk import SmallDisk

from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.disk_versions import DiskVersions
from swift_stage2.weights.snapshot import ReadSnapshot


def names(directory: Path) -> set[str]:
    """Of its files, without the ending."""
    return {path.name.removesuffix(".safetensors") for path in directory.iterdir()}


@pytest.fixture
def disk(tmp_path: Path) -> DiskVersions:
    return DiskVersions(tmp_path, keep=2)


def test_a_version_is_the_snapshot_which_anybody_may_load(disk: DiskVersions, tmp_path: Path) -> None:
    path = prove(disk, 3)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == bytes(snapshot(3).file.memory)
    assert ReadSnapshot.open(str(path)).identity == identity(3)
    read = load_file(path)
    assert read.keys() == weights().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights().items())
    assert path.stat().st_mode & 0o777 == 0o644, "a server may be another user"


def test_all_pushes_of_a_version_get_what_the_first_one_has_written(
    disk: DiskVersions, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store(disk, 1), range(4)))
    (written,) = tmp_path.iterdir()
    before = written.stat()
    store(disk, 1)
    assert written.stat() == before
    assert names(tmp_path) == {".run-1"}


def test_only_what_all_ranks_have_heard_of_is_a_version_and_the_last_ones_stay(
    disk: DiskVersions, tmp_path: Path
) -> None:
    store(disk, 1)
    assert names(tmp_path) == {".run-1"}
    for number in (2, 3, 4, 10):
        prove(disk, number)
    disk.confirm(10)  # heard of once more, of another server
    disk.close()
    assert names(tmp_path) == {"run-4", "run-10"}, (
        "the first one was not confirmed, and the next version removed it"
    )


def test_a_version_without_a_proof_goes_before_the_next_one_is_written_or_with_the_run(
    disk: DiskVersions, tmp_path: Path
) -> None:
    prove(disk, 1)
    store(disk, 2)
    assert names(tmp_path) == {"run-1", ".run-2"}
    store(disk, 3)
    assert names(tmp_path) == {"run-1", ".run-3"}
    disk.confirm(2)
    disk.close()
    assert names(tmp_path) == {"run-1"}


def test_a_run_that_keeps_nothing_leaves_nothing(tmp_path: Path) -> None:
    disk = DiskVersions(tmp_path, keep=0)
    store(disk, 1)
    disk.confirm(1)
    disk.close()
    assert names(tmp_path) == set()


def test_a_push_of_the_next_process_that_fails_leaves_the_version(disk: DiskVersions, tmp_path: Path) -> None:
    written = prove(disk, 1).stat().st_ino
    for has_written in (True, False):
        successor = DiskVersions(tmp_path, keep=2)
        if has_written:
            store(successor, 1)
        successor.close()
        assert names(tmp_path) == {"run-1"}
        assert (tmp_path / "run-1.safetensors").stat().st_ino == written


def test_a_version_of_other_weights_is_replaced_when_it_is_proven_again(
    disk: DiskVersions, tmp_path: Path
) -> None:
    path = tmp_path / "run-1.safetensors"
    path.write_bytes(snapshot(1, seed=2).file.memory)
    store(disk, 1)
    assert names(tmp_path) == {"run-1", ".run-1"}
    disk.confirm(1)
    disk.close()
    assert path.read_bytes() == bytes(snapshot(1).file.memory)


def test_what_a_killed_process_has_left_is_removed_and_that_of_another_run_is_not(
    disk: DiskVersions, tmp_path: Path
) -> None:
    for name in (".run-1", ".run-4", "run-3", "run-1-2", ".run-1-3", "other-1", ".other-2", "notes"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"half")
    store(disk, 4)
    assert names(tmp_path) == {"run-3", ".run-4", "run-1-2", ".run-1-3", "other-1", ".other-2", "notes"}
    assert len((tmp_path / ".run-4.safetensors").read_bytes()) > 4


def test_a_directory_that_cannot_be_written_is_told(small_disk: SmallDisk) -> None:
    small_disk.make_read_only()
    for directory, why in ((small_disk.path, "Read-only"), (small_disk.path / "none", "No such file")):
        disk = DiskVersions(directory, keep=2)
        with pytest.raises(ServerFault, match=why):
            store(disk, 1)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_directory_that_does_not_answer_costs_a_push_its_own_time_only(
    disk: DiskVersions, tmp_path: Path, is_held: bool
) -> None:
    if is_held:
        with disk._held(WAIT_S), pytest.raises(ServerFault, match="in the push's time"):
            disk.store(snapshot(), identity(), Deadline(0.05))
    else:
        with pytest.raises(ServerFault, match="the push's time is over"):
            disk.store(snapshot(), identity(), Deadline(0.0))
    assert os.listdir(tmp_path) == []
