"""Rounds in a directory: written whole or not at all, once for all servers; what stays, and what never counts."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rounds_on_disk import SPECS, WAIT_S, begin, prove, store, weights
from safetensors.torch import load_file
from small_disk import SmallDisk

from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.disk_manifest import DiskManifest, is_proven, mark_proven, proven_versions
from swift_stage2.weights.disk_rounds import DiskRounds
from swift_stage2.weights.tensors import checksum_tensor


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def disk(tmp_path: Path) -> DiskRounds:
    return DiskRounds(tmp_path, keep=2)


def test_a_directory_holds_the_weights_as_a_checkpoint_does_and_whose_they_are(
    disk: DiskRounds, tmp_path: Path
) -> None:
    path = store(disk, 3)
    assert path == tmp_path / "run-3"
    manifest = DiskManifest.parse((path / "manifest.json").read_bytes())
    assert (manifest.run_id, manifest.round_id, manifest.version, manifest.step) == ("run", "run-3", 3, 30)
    assert manifest.tensors == SPECS
    assert manifest.checksums == {name: checksum_tensor(tensor) for name, tensor in weights().items()}
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"] == manifest.shards
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 1
    assert {shard.name for shard in shards} == set(manifest.shards.values())
    read = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert read.keys() == weights().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights().items())
    assert {shard.stat().st_mode & 0o777 for shard in shards} == {0o644}, "a server may be another user"
    assert names(tmp_path) == {"run-3"}


def test_all_pushes_of_a_round_get_what_the_first_one_has_written(disk: DiskRounds) -> None:
    round_ = begin(disk, 1, num_pushes=4)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: disk.store(round_, Deadline(WAIT_S)), range(4)))
    written = (paths[0] / "manifest.json").stat()
    assert set(paths) == {round_.path}
    disk.store(round_, Deadline(WAIT_S))
    assert (paths[0] / "manifest.json").stat() == written


def test_only_what_all_ranks_have_heard_of_is_a_version_and_the_last_ones_stay(
    disk: DiskRounds, tmp_path: Path
) -> None:
    assert not proven_versions(tmp_path, "run")
    path = store(disk, 1)
    disk.push_ended(disk.current, proven=True)
    assert not is_proven(path)
    assert not proven_versions(tmp_path, "run")
    for number in (2, 3, 4, 10):
        prove(disk, number)
    newest = proven_versions(tmp_path, "run")[0]
    assert (newest.directory, newest.manifest.version) == (tmp_path / "run-10", 10)
    assert names(tmp_path) == {"run-4", "run-10"}, (
        "the first one was not confirmed, and the next round removed it"
    )
    assert not proven_versions(tmp_path, "ru")


def test_a_round_without_a_proof_goes_when_its_last_push_has_ended(disk: DiskRounds, tmp_path: Path) -> None:
    prove(disk, 1)
    round_ = begin(disk, 2, num_pushes=2)
    disk.store(round_, Deadline(WAIT_S))
    disk.push_ended(round_, proven=False)
    assert names(tmp_path) == {"run-1", "run-2"}
    disk.push_ended(round_, proven=False)
    assert names(tmp_path) == {"run-1"}
    disk.confirm("run-2")
    disk.close()
    assert names(tmp_path) == {"run-1"}


def test_a_catch_up_of_the_next_process_that_fails_leaves_the_version(
    disk: DiskRounds, tmp_path: Path
) -> None:
    prove(disk, 1)
    for has_written in (True, False):
        successor = DiskRounds(tmp_path, keep=2)
        round_ = begin(successor, 1)
        if has_written:
            successor.store(round_, Deadline(WAIT_S))
        successor.push_ended(round_, proven=False)
        successor.close()
        assert names(tmp_path) == {"run-1"}


def test_what_a_killed_process_has_left_is_removed_and_that_of_another_run_is_not(
    disk: DiskRounds, tmp_path: Path
) -> None:
    for name in (".run-1", "run-2", "run-3", "run-1-2", ".run-1-3", "other-1", ".other-2", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00001.safetensors").write_bytes(b"half")
    mark_proven(tmp_path / "run-3", 3)
    store(disk, 4)
    assert names(tmp_path) == {"run-3", "run-4", "run-1-2", ".run-1-3", "other-1", ".other-2", "notes"}


def test_a_version_whose_manifest_is_anothers_does_not_count(disk: DiskRounds, tmp_path: Path) -> None:
    prove(disk, 1)
    copied = tmp_path / "run-7"
    shutil.copytree(tmp_path / "run-1", copied)
    (tmp_path / "run-8").mkdir()
    mark_proven(tmp_path / "run-8", 8)
    newest = proven_versions(tmp_path, "run")[0]
    assert newest.directory == tmp_path / "run-1"


def test_a_directory_that_cannot_be_written_is_told(small_disk: SmallDisk) -> None:
    small_disk.make_read_only()
    for directory, why in ((small_disk.path, "Read-only"), (small_disk.path / "none", "No such file")):
        with pytest.raises(
            ServerFault, match=f"{why}.*make it a directory that the learner's user can write"
        ):
            store(DiskRounds(directory, keep=2), 1)


def test_a_directory_that_does_not_answer_costs_a_push_its_own_time_only(
    disk: DiskRounds, tmp_path: Path
) -> None:
    with disk._held(WAIT_S), pytest.raises(ServerFault, match="in the round's time"):
        store_within(disk, 0.05)
    assert os.listdir(tmp_path) == []


def store_within(disk: DiskRounds, timeout_s: float) -> Path:
    return disk.store(begin(disk, 1), Deadline(timeout_s))
