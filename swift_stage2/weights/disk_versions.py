"""Writes versions into a directory that learner and servers see: each once for all servers.

A file is hidden, ``.RUN-VERSION.safetensors``, until all ranks have heard of a proof; then it loses its dot, and
anybody may load it. Whatever was never proven, also of a killed process of the run, is removed before the next version
is written. Used by a publisher's pushes, on their threads.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swift_stage2.errors import ServerFault
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity
from swift_stage2.whole_file import flush_directory, open_regular

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
PATIENCE_S = 5.0
"""For a push that still writes, when a version is confirmed or the process ends."""
_WRITE_BYTES = 64 << 20  # between two looks at the deadline


class DiskVersions:
    """The versions of one run, one at a time, and the proven ones that stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        """``keep``: proven versions that stay; with 0 none does."""
        self.directory = directory
        self._keep = keep
        self._files = threading.Lock()  # held by whoever writes or removes
        self._stored: WeightIdentity | None = None

    def store(self, snapshot: SnapshotFile, identity: WeightIdentity, deadline: Deadline) -> None:
        """Has the snapshot, whose header says ``identity``, lie in the directory.

        Raises:
            ServerFault: the disk does not take it in time; nothing of it is left, as far as that can be removed.
        """
        with self._held(deadline.remaining_s()) as is_held:
            if not is_held:
                raise ServerFault(
                    f"rollout.sync.disk_directory must take the weights in the push's time, got {self.directory}, "
                    "which does not; write a longer rollout.sync.timeout_s, or another directory"
                )
            self._stored = identity
            hidden, version = self._paths(identity)
            if _holds(hidden, snapshot) or _holds(version, snapshot):
                return
            try:
                for path in self._files_of(identity, hidden=True):  # half written, or never proven
                    _remove(path)
                _write(hidden, snapshot, deadline)
            except OSError as error:
                _remove(hidden)
                raise ServerFault(
                    f"rollout.sync.disk_directory must take {snapshot.num_bytes / 1e9:.2f} GB of weights, got "
                    f"{self.directory}: {error}; free room there, lower rollout.sync.disk_keep, or make it a directory "
                    "that the learner's user can write"
                ) from error

    def confirm(self, version: int) -> None:
        """All ranks have heard of a proof: from now on its weights are a version of the run."""
        identity = self._stored
        if not self._keep or identity is None or version != identity.version:
            return
        hidden, path = self._paths(identity)
        with self._held(PATIENCE_S) as is_held:
            if not is_held:
                return
            try:
                with suppress(FileNotFoundError):  # told before
                    os.rename(hidden, path)
                    flush_directory(self.directory)
                versions = self._files_of(identity, hidden=False)
                for old in sorted(versions, key=_number, reverse=True)[self._keep :]:
                    _remove(old)
            except OSError as error:
                logger.warning("the proven weights in %s cannot be kept: %s", path, error)

    def close(self) -> None:
        """Removes what is no version, within seconds. May be called again."""
        if self._stored is not None:
            with self._held(PATIENCE_S) as is_held:
                if is_held:
                    _remove(self._paths(self._stored)[0])

    def _paths(self, identity: WeightIdentity) -> tuple[Path, Path]:
        """Before its proof, and after it."""
        name = f"{identity.name}{SUFFIX}"
        return self.directory / f".{name}", self.directory / name

    def _files_of(self, identity: WeightIdentity, *, hidden: bool) -> list[Path]:
        """All that lie there of its run. Raises OSError."""
        pattern = re.compile(
            rf"{'[.]' if hidden else ''}{re.escape(identity.run_id)}-[0-9]+{re.escape(SUFFIX)}"
        )
        return [path for path in self.directory.iterdir() if pattern.fullmatch(path.name)]

    @contextmanager
    def _held(self, timeout_s: float) -> Iterator[bool]:
        is_held = self._files.acquire(timeout=timeout_s)
        try:
            yield is_held
        finally:
            if is_held:
                self._files.release()


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _holds(path: Path, snapshot: SnapshotFile) -> bool:
    """Whether this very snapshot lies there, by its size and header."""
    with suppress(OSError), open_regular(path) as file:
        is_whole = os.fstat(file.fileno()).st_size == snapshot.file.num_bytes
        return is_whole and file.read(len(snapshot.header)) == snapshot.header
    return False


def _write(path: Path, snapshot: SnapshotFile, deadline: Deadline) -> None:
    """Raises OSError, also at the deadline."""
    with snapshot.file.reopened() as memory, open(path, "xb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o644)  # a server may be another user
        written = 0
        while written < snapshot.file.num_bytes:
            if deadline.expired:
                raise TimeoutError(errno.ETIMEDOUT, "the push's time is over")
            written += os.sendfile(file.fileno(), memory.fileno(), written, _WRITE_BYTES)
        os.fsync(file.fileno())
    flush_directory(path.parent)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed, and takes up room: %s", path, error)
