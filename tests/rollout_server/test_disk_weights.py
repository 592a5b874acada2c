"""What a server reads from a directory that somebody names, and what it refuses by name."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rounds_on_disk import SPECS, prove, weights

from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.disk_weights import DiskWeights
from swift_stage2.rollout_server.staging import SharedStaging, StagingBuffers, open_staged
from swift_stage2.rollout_server.weight_receiver import Bucket, BucketEntry, ReceivedWeights
from swift_stage2.weights.disk_rounds import DiskRounds
from swift_stage2.weights.tensors import checksum_tensor, num_bytes
from swift_stage2.wire import RoundRequest, TensorSpec

NOBODY_LEAVES = threading.Event()


def request(specs: tuple[TensorSpec, ...] = SPECS, **other: str) -> RoundRequest:
    return RoundRequest(**{"round_id": "run-1", "run_id": "run", "version": 1, "manifest": specs, **other})  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With one round, ``run-1``."""
    root = tmp_path / "root"
    root.mkdir()
    prove(DiskRounds(root, keep=2), 1)
    return root


def opened(
    root: Path,
    name: str = "run-1",
    wanted: RoundRequest | None = None,
    staging: StagingBuffers | None = None,
) -> DiskWeights:
    """As a push announces it: each tensor in a bucket of its own, but for the first two."""
    wanted = wanted or request()
    found = DiskWeights(root, name, wanted, staging or StagingBuffers())
    first, second, *rest = wanted.manifest
    for specs in ((first, second), *((spec,) for spec in rest)):
        entries, end = [], 0
        for spec in specs:
            entries.append(BucketEntry(spec, end, end + num_bytes(spec)))
            end += num_bytes(spec)
        found.expect(Bucket.from_entries(entries, 0))
    return found


def read(root: Path, name: str = "run-1", wanted: RoundRequest | None = None) -> ReceivedWeights:
    return opened(root, name, wanted).collect(10.0, NOBODY_LEAVES)


def test_the_learners_bytes_are_read_and_summed(root: Path) -> None:
    received = read(root)
    assert received.non_finite == ()
    assert received.tensors.keys() == weights().keys()
    for name, tensor in weights().items():
        assert torch.equal(received.tensors[name], tensor)
        assert received.sums is not None
        assert received.sums[name] == checksum_tensor(tensor)


def test_a_server_of_other_dtypes_gets_them_cast_as_the_learner_would_cast_them(root: Path) -> None:
    others = {"odd": "float32", "wide": "bfloat16"}
    specs = tuple(TensorSpec(each.name, each.shape, others.get(each.name, each.dtype)) for each in SPECS)
    received = read(root, wanted=request(specs))
    for spec in specs:
        expected = weights()[spec.name].to(getattr(torch, spec.dtype))
        assert torch.equal(received.tensors[spec.name], expected)
        assert (received.sums or {})[spec.name] == checksum_tensor(expected)


def test_workers_map_the_buffers_that_were_read_into(root: Path) -> None:
    staging = SharedStaging()
    received = opened(root, staging=staging).collect(10.0, NOBODY_LEAVES)
    staged = staging.stage(received.tensors)
    mapped = open_staged(staged.path, staged.num_bytes, staged.layout)
    assert all(torch.equal(mapped[name], tensor) for name, tensor in weights().items())
    staging.close()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def change_manifest(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    file = directory / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    change(manifest)
    file.write_text(json.dumps(manifest), encoding="utf-8")


def shard_of(directory: Path, name: str) -> Path:
    return directory / str(json.loads((directory / "manifest.json").read_text())["shards"][name])


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_link(path: Path) -> None:
    moved = path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(moved)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def leave_out(manifest: dict[str, object]) -> None:
    manifest["tensors"] = [spec for spec in manifest["tensors"] if spec["name"] != "wide"]  # type: ignore[attr-defined]
    for key in ("shards", "checksums"):
        del manifest[key]["wide"]  # type: ignore[attr-defined]


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (
        lambda path: flip(shard_of(path, "wide"), -1),
        r"with its manifest's checksums, got num_differing=1: wide in model-0000\d-of",
    ),
    "a cut shard": (lambda path: cut(shard_of(path, "wide")), "wide in model-.* is cut: 1 of 8192 bytes"),
    "an empty shard": (lambda path: os.truncate(shard_of(path, "wide"), 0), "the header of model-.* is cut"),
    "a header that is none": (
        lambda path: flip(shard_of(path, "wide"), 7),
        "the header of model-.* must be one of safetensors",
    ),
    "a missing shard": (lambda path: shard_of(path, "wide").unlink(), "No such file or directory: 'model-"),
    "a shard elsewhere": (lambda path: replace_by_link(shard_of(path, "wide")), "symbolic links"),
    "a shard that is a pipe": (
        lambda path: replace_by_pipe(shard_of(path, "wide")),
        "must be a regular file",
    ),
    "another shard": (
        lambda path: shutil.copy(shard_of(path, "odd"), shard_of(path, "wide")),
        "wide: Input should be a valid dictionary",
    ),
    "a shard's name that leads elsewhere": (
        lambda path: change_manifest(path, lambda each: each["shards"].update(wide="../../x")),  # type: ignore[attr-defined]
        "a file must be one name",
    ),
    "another shape": (
        lambda path: change_manifest(path, lambda each: each["tensors"][3].update(shape=[32, 64])),  # type: ignore[index]
        "must hold the round's tensors, got num_differences=1: wide",
    ),
    "another dtype": (
        lambda path: change_manifest(path, lambda each: each["tensors"][3].update(dtype="int32")),  # type: ignore[index]
        "with its manifest's checksums, got num_differing=1: wide",
    ),
    "no dtype": (
        lambda path: change_manifest(path, lambda each: each["tensors"][3].update(dtype="save")),  # type: ignore[index]
        "dtype must be the name of a torch dtype",
    ),
    "a missing tensor": (
        lambda path: change_manifest(path, leave_out),
        "must hold the round's tensors, got num_differences=1: wide",
    ),
    "another run's": (
        lambda path: change_manifest(path, lambda each: each.update(run_id="other")),
        "must be of run run, round run-1, got run_id='other'",
    ),
    "another round's": (
        lambda path: change_manifest(path, lambda each: each.update(round_id="run-0")),
        "must be of run run, round run-1, got run_id='run' round_id='run-0'",
    ),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "No such file or directory: 'manifest.json'",
    ),
    "a cut manifest": (lambda path: cut(path / "manifest.json"), "manifest.json must be JSON"),
    "a manifest elsewhere": (lambda path: replace_by_link(path / "manifest.json"), "symbolic links"),
    "a directory elsewhere": (replace_by_link, "Not a directory: 'run-1'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_directory_is_refused_by_name(root: Path, name: str) -> None:
    fault, told = FAULTS[name]
    if name == "a directory elsewhere":
        (root / "run-1").rename(root.parent / "elsewhere")
        (root / "run-1").symlink_to(root.parent / "elsewhere")
    else:
        fault(root / "run-1")
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RoundFailed, match=told) as caught:
        read(root)
    assert f"'run-1' of --weights-root {root}" in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../root/run-1", "run-1/", "/etc", ".run-1", "a\0b", "run-1\n", "ı"]
)
def test_no_other_name_is_looked_at(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("nothing may be opened")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RoundFailed, match="it must be one name"):
        DiskWeights(root, name, request(), StagingBuffers())


def test_a_round_that_ends_and_a_caller_that_goes_end_the_reading(root: Path) -> None:
    gone = threading.Event()
    gone.set()
    with pytest.raises(RoundFailed, match="the caller has gone"):
        opened(root).collect(10.0, gone)
    with pytest.raises(RoundFailed, match=r"timeout_s=0\.0 is over"):
        opened(root).collect(0.0, NOBODY_LEAVES)
    found = opened(root)
    found.close()
    with pytest.raises(RoundFailed, match="the round has ended"):
        found.collect(10.0, NOBODY_LEAVES)
    with pytest.raises(RoundFailed, match="the round has ended"):
        found.expect(Bucket.from_entries([BucketEntry(SPECS[0], 0, 6)], 0))
    assert found.join(0.0)


def test_nobody_else_gets_the_buffers_while_they_are_written(root: Path) -> None:
    staging, found = StagingBuffers(), []
    really = staging.buffer

    def look(index: int, size: int) -> torch.Tensor:
        found.append(weights_.join(0.0))
        return really(index, size)

    weights_ = opened(root, staging=staging)
    staging.buffer = look  # type: ignore[method-assign]
    weights_.collect(10.0, NOBODY_LEAVES)
    assert set(found) == {False}
    assert weights_.join(0.0)
