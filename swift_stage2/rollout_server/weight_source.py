"""How offered weights come: in a learner's memory file, by a stream, or in a file below ``--weights-root``.

However they come, they then lie in one memory file that nobody can cut, a snapshot that this process and vLLM's workers
open alike. Whoever may call the server names the learner's file, so it is looked at before it is opened. A disk's file
may be cut meanwhile, so it is copied and never mapped.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import BinaryIO

import torch

from swift_stage2.errors import InstallFailed, ProtocolError, WeightsRefused
from swift_stage2.runtime.memory import MEMORY_PREFIX
from swift_stage2.weights.disk_versions import SUFFIX
from swift_stage2.weights.snapshot import ReadSnapshot
from swift_stage2.weights.stream import WeightListener
from swift_stage2.weights.tensors import snapshot_bytes
from swift_stage2.wire import RefusalReason, TensorSpec, WeightOffer

_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_MOST_HEADER_BYTES = 100_000_000  # safetensors takes no more
_READ_BYTES = 64 << 20  # between two looks at whether anybody still wants it
_GIVEN_UP_POLL_S = 0.25
_MAX_SHOWN = 5
ENDED = "the offer has ended"


class WeightSource:
    """Weights of an offer, in a memory file that nobody can cut: all there, or on their way from ``origin``."""

    def __init__(
        self,
        offer: WeightOffer,
        file: BinaryIO,
        memory: memoryview | None = None,
        origin: WeightListener | DiskFile | None = None,
    ) -> None:
        """Takes the file over; ``memory`` is all of it, which a thread fills from ``origin``.

        Raises ProtocolError: without an origin, if it is no snapshot of that version, or of other tensors.
        """
        self.offer = offer
        self.tensors: Mapping[str, torch.Tensor] = {}
        """Views of the file, once all has arrived: in the learner's dtypes, in the file's order."""
        self.arrived: Mapping[str, str] = {}
        """Checksums of the tensors, once somebody has summed them."""
        self._file, self._memory, self._origin = file, memory, origin
        self._snapshot: ReadSnapshot | None = None
        self._lock = threading.Lock()  # else a lent descriptor could be another file's, behind a close
        self._has_ended, self._is_closed = threading.Event(), False
        self._failure = ""
        self._thread = threading.Thread(
            target=self._receive,
            args=(time.monotonic() + offer.timeout_s,),
            name="weight-receiver",
            daemon=True,
        )
        if origin is not None:
            self._thread.start()
            return
        try:
            self._open()
        except BaseException:
            file.close()
            raise

    @property
    def name(self) -> tuple[str, int]:
        return self.offer.run_id, self.offer.version

    def collect(self, timeout_s: float, given_up: threading.Event) -> None:
        """Returns once all ``tensors`` are there.

        Raises:
            InstallFailed: they do not come or are not of that version, the time ran out or ``given_up`` was set.
        """
        end = time.monotonic() + timeout_s
        while not given_up.is_set() and (left_s := end - time.monotonic()) > 0:
            if self._has_ended.wait(min(left_s, _GIVEN_UP_POLL_S)):
                break
        why = self._failure or ("" if self._has_ended.is_set() else f"timeout_s={timeout_s:.1f} is over")
        if self._is_closed or given_up.is_set():
            why = ENDED if self._is_closed else "the caller has gone"
        if why:
            raise InstallFailed(f"the weights did not arrive: {why}")

    def require(self, checksums: Mapping[str, str]) -> None:
        """Keeps the sums of what arrived. Raises InstallFailed unless they are those that the file says."""
        assert self._snapshot is not None
        self.arrived = checksums
        if wrong := self._snapshot.differing(checksums):
            raise InstallFailed(
                f"weights must arrive as they were sent, got {_told(wrong)} with other checksums"
            )

    def lend(self) -> tuple[str, BinaryIO]:
        """A path for processes that may read this one's memory, and the descriptor that it names.

        It is the very file that was looked at for as long as they may come, whatever becomes of learner and offer.
        Raises InstallFailed when the offer has ended.
        """
        with self._lock:
            if self._is_closed:
                raise InstallFailed(ENDED)
            file = os.fdopen(os.dup(self._file.fileno()), "rb", buffering=0)
        return f"/proc/{os.getpid()}/fd/{file.fileno()}", file

    def close(self) -> None:
        """Ends its use at once, also in the middle of a transfer, and lends nothing any more. May be called again."""
        with self._lock:
            self._is_closed = True
            self._file.close()
        if self._origin is not None:
            self._origin.close()

    def join(self, timeout_s: float) -> bool:
        """True once nobody writes into the memory any more; after a close its mapping then ends with its last view."""
        if self._origin is not None:
            self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        if has_ended and self._is_closed:
            self.tensors, self._snapshot = {}, None
        return has_ended

    def _receive(self, end: float) -> None:
        assert self._origin is not None
        assert self._memory is not None
        try:
            self._origin.receive(self._memory, end - time.monotonic())
            self._open()
        except Exception as error:  # top of the thread; told by collect
            lines = str(error).splitlines() or [""]
            self._failure = f"{type(error).__name__}: {lines[0]}"
        finally:
            self._has_ended.set()
            self._origin.close()

    def _open(self) -> None:
        snapshot, offer = ReadSnapshot.open(f"/proc/self/fd/{self._file.fileno()}"), self.offer
        found = snapshot.identity
        if (found.run_id, found.version) != self.name:
            raise ProtocolError(
                f"weights must be version {offer.version} of run {offer.run_id}, got version={found.version} "
                f"run_id={shown(found.run_id)}"
            )
        if different := _different(snapshot.specs().values(), offer.manifest):
            raise ProtocolError(f"weights must be the offered tensors, got {_told(different)}")
        self._snapshot, self.tensors = snapshot, snapshot.tensors
        if self._memory is not None:  # a quarter of a second for each GiB of new pages less
            self.tensors = _within(self._memory, snapshot.tensors)
        self._has_ended.set()


class DiskFile:
    """A version's file on a disk, before its proof or after: one name in the root, which no link is followed to."""

    def __init__(self, root: Path, name: str) -> None:
        """``name``: without its suffix. Raises InstallFailed: it is not there, or is no regular file."""
        self.where = f"{shown(name)} in --weights-root {root}"
        self._is_closed = threading.Event()
        # Not blocking: the opening of a pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            if not _NAME.fullmatch(name):
                raise OSError("a version on a disk must be named by letters, digits, '_', '-' and '.'")
            try:
                descriptor = os.open(root / f".{name}{SUFFIX}", flags)
            except FileNotFoundError:  # proven meanwhile, or before a catch-up
                descriptor = os.open(root / f"{name}{SUFFIX}", flags)
            self._file = os.fdopen(descriptor, "rb", buffering=0)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._file.close()
                raise OSError("it must be a regular file")
        except OSError as error:
            raise InstallFailed(f"weights cannot be read: {self.where}: {error}") from error
        self.num_bytes = os.fstat(descriptor).st_size

    def receive(self, memory: memoryview, timeout_s: float) -> None:
        """Raises OSError: it is cut, cannot be read in time, or ``close`` was called."""
        end, done = time.monotonic() + timeout_s, 0
        with self._file as file:
            while done < len(memory):
                if self._is_closed.is_set() or time.monotonic() > end:
                    raise TimeoutError("the disk is too slow")
                num_read = os.preadv(file.fileno(), [memory[done : done + _READ_BYTES]], done)
                if not num_read:
                    raise OSError(f"{self.where} is cut")
                done += num_read

    def close(self) -> None:
        """Whoever reads hears of it soon. May be called again."""
        self._is_closed.set()


def require_size(num_bytes: int, manifest: Sequence[TensorSpec]) -> None:
    """Raises ProtocolError unless a snapshot of these tensors may have so many bytes."""
    least = snapshot_bytes(manifest)
    if not least <= num_bytes <= least + _MOST_HEADER_BYTES:
        raise ProtocolError(
            f"a snapshot must have {least} bytes of tensors and at most {_MOST_HEADER_BYTES} more, got "
            f"num_bytes={num_bytes}"
        )


def open_learner_memory(path: str) -> BinaryIO:
    """The memory file of a learner that runs as this user, to be read from. Raises OSError: it is something else."""
    if not _PATH.fullmatch(path):
        raise OSError(f"path must be /proc/<pid>/fd/<number>, got path={shown(path)}")
    named = os.open(path, os.O_PATH | os.O_CLOEXEC)  # holds the file, and does not open it
    try:
        link = f"/proc/self/fd/{named}"
        target, found = os.readlink(link), os.fstat(named)
        is_memory = target.startswith(f"/memfd:{MEMORY_PREFIX}") and stat.S_ISREG(found.st_mode)
        if not is_memory or found.st_nlink:  # a memory file stands in no directory
            raise OSError(f"{path} must be a learner's memory file, got target={shown(target)}")
        if os.geteuid() not in (0, found.st_uid):
            raise OSError(f"{path} must be of the server's own user, got uid={found.st_uid}")
        file = os.fdopen(os.open(link, os.O_RDONLY | os.O_CLOEXEC), "rb", buffering=0)
    finally:
        os.close(named)
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # its reader would be killed by SIGBUS
        file.close()
        raise OSError(f"{path} must be sealed against being cut (F_SEAL_SHRINK)")
    return file


def compare_manifests(own: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> None:
    """Raises WeightsRefused unless both hold the same tensors in any order; dtypes are cast."""
    if different := _different(*([replace(spec, dtype="") for spec in specs] for specs in (own, theirs))):
        raise WeightsRefused(
            RefusalReason.MANIFEST_DIFFERS,
            f"new weights must be the model's own tensors, got {_told(different)}; serve the model that is trained",
        )


def _different(here: Iterable[TensorSpec], there: Iterable[TensorSpec]) -> list[str]:
    """Names of tensors that only one side has, or has so."""
    return sorted({spec.name for spec in set(here) ^ set(there)})


def _within(memory: memoryview, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors of a file in another mapping of it: they end with the file, one behind the other."""
    sizes = [tensor.nbytes for tensor in tensors.values()]
    flat = torch.frombuffer(memory, dtype=torch.uint8)[len(memory) - sum(sizes) :]
    return {
        name: part.view(tensor.dtype).reshape(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), torch.split(flat, sizes), strict=True)
    }


def _told(names: Sequence[str]) -> str:
    return f"num_differences={len(names)}: {', '.join(names[:_MAX_SHOWN])}"
