"""A checkpoint that a disk did not take is removed again by the rank that owns it, and by no other."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from swift_stage2.errors import StorageFull
from swift_stage2.run_directory.checkpoints import whole_checkpoint


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
