"""A checkpoint that a disk did not take is removed by the rank that owns it; one that is written over is void first."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sft_run import our_trainer

from swift_stage2.errors import StorageFull
from swift_stage2.runtime import checkpoints
from swift_stage2.runtime.checkpoints import is_storage_failure, whole_checkpoint


@pytest.mark.parametrize(
    ("is_owner", "has_state", "stays"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_a_checkpoint_that_a_full_disk_cut_does_not_stay(
    tmp_path: Path, is_owner: bool, has_state: bool, stays: bool
) -> None:
    directory = tmp_path / "checkpoint-3"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"cut")
    if has_state:  # it was whole before what failed
        (directory / "trainer_state.json").write_text("{}")
    full = OSError(errno.ENOSPC, "No space left on device")
    expected = OSError if has_state else StorageFull
    with pytest.raises(expected, match="No space left"), whole_checkpoint(directory, is_owner=is_owner):
        raise full
    assert directory.exists() is stays


def test_what_is_no_failure_of_a_disk_keeps_its_name_and_leaves_no_checkpoint_either(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-3"
    directory.mkdir()
    with pytest.raises(ValueError, match="no disk"), whole_checkpoint(directory, is_owner=True):
        raise ValueError("no disk")
    assert not directory.exists()


def test_the_trainer_voids_a_checkpoint_before_any_rank_writes_over_it(
    tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = our_trainer(rows_file, tmp_path, save_strategy="steps", save_steps=1)
    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text("{}")
    was_whole, write_state = [], checkpoints.write_state

    def look_and_write(directory: str, **facts: Any) -> None:
        was_whole.append(state.exists())
        write_state(directory, **facts)

    monkeypatch.setattr(checkpoints, "write_state", look_and_write)
    trainer.train()
    assert was_whole == [False]
    assert json.loads(state.read_text())["global_step"] == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_file({"a": torch.zeros(4096)}, path),
        lambda path: torch.save({"a": torch.zeros(4096)}, path),
    ],
    ids=["safetensors", "torch"],
)
def test_what_writers_of_tensors_say_when_there_is_no_room_is_a_failure_of_the_disk(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1024, limits[1])
    )  # Python ignores the signal of a file that is larger
    try:
        with pytest.raises((SafetensorError, RuntimeError)) as failure:
            write(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_storage_failure(failure.value)


def test_a_broken_file_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"none")
    with pytest.raises(SafetensorError) as failure, safe_open(tmp_path / "file", "pt"):
        pass
    assert not is_storage_failure(failure.value)
