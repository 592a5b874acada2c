"""The memory file that a snapshot lies in, which other processes of this host map instead of being sent its bytes.

The file is anonymous (memfd_create(2)): it has no name in any directory, ends with its owner and whoever maps it, and
is opened through ``/proc/<owner>/fd``, which the kernel allows to the owner's own user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping

import torch

from swift_stage2.errors import WeightSyncError
from swift_stage2.runtime.memory import available_memory_bytes
from swift_stage2.wire import MEMORY_PREFIX, MEMORY_TOKEN_BYTES, LearnerMemory


class SnapshotMemory:
    """One file, allocated once. Its last bytes are a token, by which who maps it knows that it is this one."""

    def __init__(self) -> None:
        self._fd = -1
        self.where = LearnerMemory("", 0, "")
        """Names it to other processes of this host."""
        self.dtypes: Mapping[str, str] = {}
        """Of the tensors that lie in it, by name."""

    def allocate(self, num_bytes: int, dtypes: Mapping[str, str]) -> torch.Tensor:
        """Memory for that many bytes of tensors, as uint8.

        Raises:
            WeightSyncError: main memory has no room for it.
        """
        _require_room(num_bytes)
        self._fd = os.memfd_create(f"{MEMORY_PREFIX}snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        whole = num_bytes + MEMORY_TOKEN_BYTES
        try:  # memory that is not there is told now, not by SIGBUS when it is touched
            os.posix_fallocate(self._fd, 0, whole)
        except OSError as error:
            raise WeightSyncError(f"rank 0's copy of the weights got no memory: {error}") from error
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who maps it must not meet its end
        mapped = mmap.mmap(self._fd, whole)
        token = secrets.token_bytes(MEMORY_TOKEN_BYTES)
        mapped[num_bytes:] = token
        self.where = LearnerMemory(f"/proc/{os.getpid()}/fd/{self._fd}", whole, token.hex())
        self.dtypes = dtypes
        return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]

    def close(self) -> None:
        """Nobody can map it any more; mappings that there are stay. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MappedMemory(SnapshotMemory):
    """The same file in another process of its owner's host, whose mapping it keeps from round to round.

    Mapped for writing, because tensors over read-only memory warn; nobody writes.
    """

    def __init__(self, where: LearnerMemory) -> None:
        super().__init__()
        self.where = where

    def allocate(self, num_bytes: int, dtypes: Mapping[str, str]) -> torch.Tensor:
        """As ``SnapshotMemory.allocate``. Raises OSError: the owner is gone."""
        self.dtypes = dtypes
        self._fd = os.open(self.where.path, os.O_RDWR | os.O_CLOEXEC)
        return torch.frombuffer(mmap.mmap(self._fd, self.where.num_bytes), dtype=torch.uint8)[:num_bytes]


def _require_room(num_bytes: int) -> None:
    available = available_memory_bytes()
    if num_bytes > available:
        raise WeightSyncError(
            f"rank 0 keeps a copy of the weights in main memory, got {num_bytes / 1e9:.1f} GB of weights and "
            f"{available / 1e9:.1f} GB available; give its machine or container more, or train a smaller model"
        )
