"""A learner's memory file on this machine, mapped for one round: its weights are read where they lie.

The path comes from whoever may call the server. So it must be that of a process's descriptor, and what it names is
looked at before it is opened: a memory file of a learner that runs as the same user.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable
from reprlib import repr as shown
from typing import BinaryIO

import torch

from swift_stage2.errors import RoundFailed
from swift_stage2.rollout_server.staging import StagedWeights, map_privately
from swift_stage2.rollout_server.weight_receiver import ENDED, Bucket, ReceivedWeights, describe
from swift_stage2.wire import MEMORY_PREFIX, MEMORY_TOKEN_BYTES, LearnerMemory

_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class MappedSnapshot:
    """Stands in the place of a ``WeightReceiver``: what is expected has arrived at once."""

    failed = False

    def __init__(self, offer: LearnerMemory) -> None:
        """Raises OSError: it is no such file, is not to be opened, or is not the one that the token is from."""
        self._lock = threading.Lock()
        self._buckets: list[Bucket] = []
        self._num_bytes = offer.num_bytes - MEMORY_TOKEN_BYTES
        self._fd = _open_memory(offer)
        try:
            self._flat: torch.Tensor | None = map_privately(self._fd, offer.num_bytes)
            token = self._flat[self._num_bytes :].numpy().tobytes()
            if not secrets.compare_digest(token, bytes.fromhex(offer.token)):
                raise OSError(f"the token at the end of {offer.path} is that of another learner")
        except BaseException:
            self.close()
            raise

    def expect(self, bucket: Bucket) -> None:
        """Notes where a bucket lies. Raises RoundFailed: not in the file, or the round has ended."""
        with self._lock:
            self._require_open()
            if bucket.offset is None or bucket.offset + bucket.num_bytes > self._num_bytes:
                raise RoundFailed(
                    f"a bucket must lie in the {self._num_bytes} bytes of the learner's memory, got "
                    f"offset={bucket.offset} num_bytes={bucket.num_bytes}"
                )
            self._buckets.append(bucket)

    def collect(self, timeout_s: float, given_up: threading.Event) -> ReceivedWeights:
        """All that was announced, as views of the file. Raises RoundFailed when the round has ended."""
        with self._lock:
            flat, buckets = self._require_open(), list(self._buckets)
        return describe(((bucket, flat[_first(bucket) :]) for bucket in buckets), self)

    def lend(self, names: Iterable[str]) -> tuple[StagedWeights, BinaryIO]:
        """Names these tensors' places to processes that may read this one's memory.

        They open the file by the descriptor that returns: the very file that was looked at, and for as long as they
        may come, whatever becomes of the learner and of the round. Raises RoundFailed when the round has ended.
        """
        wanted = set(names)
        with self._lock:
            self._require_open()
            layout = [
                [entry.spec.name, list(entry.spec.shape), entry.spec.dtype, _first(bucket) + entry.start]
                for bucket in self._buckets
                for entry in bucket.entries
                if entry.spec.name in wanted
            ]
            file = os.fdopen(os.dup(self._fd), "rb", buffering=0)
        return StagedWeights(f"/proc/{os.getpid()}/fd/{file.fileno()}", self._num_bytes, layout), file

    def close(self) -> None:
        """Ends its use at once. May be called again."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def join(self, timeout_s: float) -> bool:
        """Lets the mapping go, which takes its time; it ends with the last view of it. True: there is no thread."""
        self._flat = None
        return True

    def _require_open(self) -> torch.Tensor:
        if self._flat is None or self._fd < 0:
            raise RoundFailed(ENDED)
        return self._flat


def _first(bucket: Bucket) -> int:
    assert bucket.offset is not None  # ``expect`` has looked
    return bucket.offset


def _open_memory(offer: LearnerMemory) -> int:
    """A descriptor of the file, to be read from. Raises OSError."""
    if not _PATH.fullmatch(offer.path):
        raise OSError(f"path must be /proc/<pid>/fd/<number>, got path={shown(offer.path)}")
    named = os.open(offer.path, os.O_PATH | os.O_CLOEXEC)  # holds the file, and does not open it
    try:
        link = f"/proc/self/fd/{named}"
        target, found = os.readlink(link), os.fstat(named)
        is_memory = target.startswith(f"/memfd:{MEMORY_PREFIX}") and stat.S_ISREG(found.st_mode)
        if not is_memory or found.st_nlink:  # a memory file stands in no directory
            raise OSError(f"{offer.path} must be a learner's memory file, got target={shown(target)}")
        if os.geteuid() not in (0, found.st_uid):
            raise OSError(f"{offer.path} must be of the server's own user, got uid={found.st_uid}")
        if found.st_size != offer.num_bytes:
            raise OSError(f"{offer.path} must have {offer.num_bytes} bytes, got {found.st_size}")
        return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(named)
