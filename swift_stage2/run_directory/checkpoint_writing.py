"""Sees to it that a checkpoint is whole or is not there, and tells of a disk that does not take it in one line.

Writers of weights tell of a full disk each in their own way: an OSError, safetensors' own error, torch's RuntimeError.
Called by the trainer around what writes a checkpoint.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from swift_stage2.errors import StorageFull
from swift_stage2.run_directory.checkpoint_check import why_not_whole

_STATE = "trainer_state.json"  # written last, by rank 0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_MIB = 2**20


@contextmanager
def whole_checkpoint(directory: Path, *, is_owner: bool) -> Iterator[None]:
    """Removes ``directory`` again if what is done inside does not make a whole checkpoint of it.

    Only its owner removes it, the rank that writes the weights and the trainer's state: under a rank that still
    writes, a new directory would appear that looks whole and is not.

    Raises:
        StorageFull: the disk did not take it.
    """
    try:
        yield
    except Exception as error:
        if is_owner and _has_state(directory):
            raise  # what failed came after it
        if is_owner:
            shutil.rmtree(directory, ignore_errors=True)
        if not is_storage_failure(error):
            raise
        left = f"go on from {last}" if (last := _last_whole(directory.parent)) else "no whole one is left"
        raise StorageFull(
            f"a checkpoint needs a disk that takes it whole, got {directory}: {_words(error)} "
            f"({_free_mib(directory.parent):,.0f} MiB free now); make room, then {left}"
        ) from error


def is_storage_failure(error: BaseException) -> bool:
    """Whether a disk did not take what was written."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    words = str(error)
    return (isinstance(error, SafetensorError) and "os error" in words) or (
        isinstance(error, RuntimeError) and ("PytorchStreamWriter" in words or "inline_container" in words)
    )


def _has_state(directory: Path) -> bool:
    try:
        return isinstance(json.loads((directory / _STATE).read_bytes()), dict)
    except (OSError, ValueError):
        return False


def _last_whole(run_dir: Path) -> Path | None:
    found = [path for path in run_dir.glob("checkpoint-*") if not why_not_whole(path, needs_stage2=False)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _free_mib(directory: Path) -> float:
    return shutil.disk_usage(directory).free / _MIB


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
