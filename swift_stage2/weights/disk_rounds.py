"""Writes rounds' snapshots into a directory that learner and servers see: once for all servers of a round.

A file is hidden, ``.RUN-VERSION.safetensors``, until all ranks have heard of a proof; then it loses its dot and is a
version of the run that anybody may load. Whatever was never proven, also of a killed process of the run, is removed
before the next round is written. Used by a courier's pushes, on their threads.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
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
_PATIENCE_S = 5.0
"""For what still works in the directory when a process ends."""
CLOSE_S = 2 * _PATIENCE_S
"""``DiskRounds.close`` waits for so long at most, besides its removal."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRITE_BYTES = 64 << 20  # between two looks at the deadline


def version_name(run_id: str, version: int) -> str:
    """Of a version's file, without its suffix."""
    return f"{run_id}-{version}"


class DiskRounds:
    """The rounds of one run, one at a time, and the proven versions that stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        """``keep``: proven versions that stay; with 0 none does."""
        self.directory = directory
        self._keep = keep
        self._files = threading.Lock()  # held by whoever writes or removes
        self._identity: WeightIdentity | None = None
        self._fault: ServerFault | None = None
        self._keeper: threading.Thread | None = None

    def begin(self, identity: WeightIdentity) -> None:
        """The round that pushes ask for from now on, or once more, in a catch-up; the first one that does writes it."""
        self._identity, self._fault = identity, None

    def store(self, snapshot: SnapshotFile, deadline: Deadline) -> None:
        """Has the snapshot, whose header is written, lie in the directory as the round that has begun last.

        Raises:
            ServerFault: the disk does not take it in time; nothing of it is left, as far as that can be removed.
        """
        identity = self._identity
        assert identity is not None
        with self._held(deadline.remaining_s()) as is_held:
            if not is_held:
                raise ServerFault(
                    f"rollout.sync.disk_directory must take the weights in the round's time, got {self.directory}, "
                    "which does not; write a longer rollout.sync.timeout_s, or another directory"
                )
            if identity is not self._identity:
                raise ServerFault("the round was given up before its weights were written")
            if self._fault is not None:  # of an attempt that another push has made
                raise ServerFault(str(self._fault))
            hidden, version = self._paths(identity)
            if _holds(hidden, snapshot) or _holds(version, snapshot):
                return
            for path in self._rounds(identity, hidden=True):  # half written, or never proven
                _remove(path)
            try:
                _write(hidden, snapshot, deadline)
            except OSError as error:
                self._fault = self._refused(error, snapshot)  # before there is room again
                _remove(hidden)
                raise self._fault from error

    def confirm(self, version: int) -> None:
        """All ranks have heard of its proof: its file loses the dot. Waits for no disk."""
        identity = self._identity
        if self._keep and identity is not None and version == identity.version:
            self._keeper = threading.Thread(
                target=self._keep_version, args=(identity,), name="disk-keeper", daemon=True
            )
            self._keeper.start()

    def close(self) -> None:
        """Removes what is no version, within seconds. May be called again."""
        if self._keeper is not None:
            self._keeper.join(_PATIENCE_S)
        identity, self._identity = self._identity, None
        if identity is not None:
            with self._held(_PATIENCE_S) as is_held:
                if is_held:
                    _remove(self._paths(identity)[0])

    def _keep_version(self, identity: WeightIdentity) -> None:
        hidden, version = self._paths(identity)
        with self._held(_PATIENCE_S) as is_held:
            if not is_held:
                return
            try:
                with suppress(
                    FileNotFoundError
                ):  # told before, or all of its servers had their weights otherwise
                    os.rename(hidden, version)
                    flush_directory(self.directory)
                versions = self._rounds(identity, hidden=False)
                for old in sorted(versions, key=_number, reverse=True)[self._keep :]:
                    _remove(old)
            except OSError as error:
                logger.warning("the proven weights in %s cannot be kept: %s", version, error)

    def _paths(self, identity: WeightIdentity) -> tuple[Path, Path]:
        """Before its proof, and after it."""
        name = f"{version_name(identity.run_id, identity.version)}{SUFFIX}"
        return self.directory / f".{name}", self.directory / name

    def _rounds(self, identity: WeightIdentity, *, hidden: bool) -> list[Path]:
        """All that lie there of its run."""
        run_id = re.escape(identity.run_id)
        pattern = re.compile(rf"{'[.]' if hidden else ''}{run_id}-[^-]+{re.escape(SUFFIX)}")
        with suppress(OSError):  # the write that follows says why
            return [path for path in self.directory.iterdir() if pattern.fullmatch(path.name)]
        return []

    def _refused(self, error: OSError, snapshot: SnapshotFile) -> ServerFault:
        free = ""
        with suppress(OSError):
            free = f", {shutil.disk_usage(self.directory).free / 1e9:.2f} GB free"
        remedy = "free room there, or lower rollout.sync.disk_keep"
        if error.errno not in _FULL:
            remedy = "make it a directory that the learner's user can write"
        return ServerFault(
            f"rollout.sync.disk_directory must take {snapshot.num_bytes / 1e9:.2f} GB of weights, got "
            f"{self.directory}{free}: {error}; {remedy}"
        )

    @contextmanager
    def _held(self, timeout_s: float) -> Iterator[bool]:
        is_held = self._files.acquire(timeout=timeout_s)
        try:
            yield is_held
        finally:
            if is_held:
                self._files.release()


def _number(path: Path) -> tuple[int, str]:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1, number


def _holds(path: Path, snapshot: SnapshotFile) -> bool:
    """Whether this very snapshot lies there, by its size and header."""
    with suppress(OSError), open_regular(path) as file:
        is_whole = os.fstat(file.fileno()).st_size == snapshot.file.num_bytes
        return is_whole and file.read(len(snapshot.header)) == snapshot.header
    return False


def _write(path: Path, snapshot: SnapshotFile, deadline: Deadline) -> None:
    """Raises OSError, also at the deadline."""
    with suppress(FileNotFoundError):
        path.unlink()
    with snapshot.file.reopened() as memory, open(path, "xb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o644)  # a server may be another user
        written = 0
        while written < snapshot.file.num_bytes:
            if deadline.expired:
                raise TimeoutError(errno.ETIMEDOUT, "the round's time is over")
            written += os.sendfile(file.fileno(), memory.fileno(), written, _WRITE_BYTES)
        os.fsync(file.fileno())
    flush_directory(path.parent)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed, and takes up room: %s", path, error)
