"""Writes rounds' weights into a directory that learner and servers see: once for all servers of a round.

A directory is written under a hidden name and gets its own when all of it is on the disk. It counts as a version once
all ranks have heard of a proof; without one it goes with its round. Whatever a killed process of the run has left is
removed before the next round is written. Used by a courier's pushes, on their threads.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from swift_stage2.errors import ServerFault, WeightSyncError
from swift_stage2.servers.session import Deadline
from swift_stage2.weights.disk_manifest import (
    DiskManifest,
    is_proven,
    mark_proven,
    proven_versions,
    rounds_of,
)
from swift_stage2.weights.proof import RoundOrder
from swift_stage2.weights.snapshot import CastMemory, WeightBucket
from swift_stage2.whole_file import flush_directory

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""For what still works in the directory when a process ends."""
CLOSE_S = 2 * _PATIENCE_S
"""``DiskRounds.close`` waits for so long at most, besides its removal."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RoundOnDisk:
    """One round's directory. The first push that needs it writes it, the others wait for that one."""

    def __init__(
        self, directory: Path, order: RoundOrder, buckets: Sequence[WeightBucket], num_pushes: int
    ) -> None:
        self.path = directory / order.round_id
        self.order = order
        self.num_running = num_pushes
        self.is_proven = self.is_written = False
        """By a server, as far as its push knows; a catch-up finds the round that it brings."""
        self._buckets = buckets
        self.fault: ServerFault | WeightSyncError | None = None
        """Of an attempt to write it, which pushes that come later do not repeat."""

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.nbytes for bucket in self._buckets for _, tensor in bucket.tensors)

    def write(self) -> None:
        """Writes it, unless that was done or tried before; called by one thread at a time.

        Raises:
            ServerFault: the disk does not take it; nothing of it is left, as far as the disk lets it be removed.
            WeightSyncError: the weights are not finite.
        """
        if self.fault is not None:
            raise type(self.fault)(str(self.fault))
        if self.is_written:
            return
        partial = _hidden(self.path)
        try:
            partial.mkdir()
            self._fill(partial)
            os.rename(partial, self.path)
            flush_directory(self.path.parent)
        except (OSError, SafetensorError) as error:
            self.fault = self._refused(error)  # before there is room again
            raise self.fault from error
        except WeightSyncError as error:
            self.fault = WeightSyncError(str(error))
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self.is_written = True

    def _fill(self, partial: Path) -> None:
        shards, checksums, memory = {}, {}, CastMemory()
        for number, bucket in enumerate(self._buckets, start=1):
            sums = bucket.pack({}, memory).checksums  # as pushes to servers of the same dtypes need them
            shard = f"model-{number:05d}-of-{len(self._buckets):05d}.safetensors"
            save_file(dict(bucket.tensors), partial / shard, metadata={"format": "pt"})
            descriptor = os.open(partial / shard, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fchmod(descriptor, 0o644)  # safetensors leaves it to its writer alone
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            shards.update(dict.fromkeys(sums, shard))
            checksums.update(sums)
        order = self.order
        DiskManifest(
            order.run_id, order.round_id, order.version, order.step, order.manifest, shards, checksums
        ).write(partial, self.num_bytes)

    def _refused(self, error: Exception) -> ServerFault:
        is_full = getattr(error, "errno", None) in _FULL or any(
            f"(os error {n})" in str(error) for n in _FULL
        )
        directory, free = self.path.parent, ""
        with suppress(OSError):
            free = f", {shutil.disk_usage(directory).free / 1e9:.2f} GB free"
        remedy = "free room there, or lower rollout.sync.disk_keep"
        if not is_full:
            remedy = "make it a directory that the learner's user can write"
        return ServerFault(
            f"rollout.sync.disk_directory must take {self.num_bytes / 1e9:.2f} GB of weights, got {directory}{free}: "
            f"{' '.join(str(error).split())}; {remedy}"
        )


class DiskRounds:
    """The rounds of one run, one at a time, and the proven versions that stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        """``keep``: proven versions that stay; with 0 every round is removed when its pushes have ended."""
        self._directory = directory
        self._keep = keep
        self._files = threading.Lock()  # held by whoever writes or removes
        self._changed = threading.Lock()
        self._round: RoundOnDisk | None = None
        self._confirmed = ""  # round id
        self._keeper: threading.Thread | None = None

    def begin(self, order: RoundOrder, buckets: Sequence[WeightBucket], num_pushes: int) -> RoundOnDisk:
        """The round that pushes ask for from now on; nothing is written before one does, nor again for a catch-up."""
        with self._changed:
            if self._round is not None and self._round.path.name == order.round_id:
                self._round.num_running += num_pushes
                self._round.fault = None
                return self._round
            round_ = self._round = RoundOnDisk(self._directory, order, buckets, num_pushes)
            return round_

    @property
    def current(self) -> RoundOnDisk:
        """The round that has begun last."""
        assert self._round is not None
        return self._round

    def store(self, round_: RoundOnDisk, deadline: Deadline) -> Path:
        """The round's directory, which its first push writes. Raises as ``RoundOnDisk.write``, and at the deadline."""
        with self._held(deadline.remaining_s()) as is_held:
            if not is_held:
                raise ServerFault(
                    f"rollout.sync.disk_directory must take the weights in the round's time, got {self._directory}, "
                    "which does not; write a longer rollout.sync.timeout_s, or another directory"
                )
            if round_ is not self._round:
                raise ServerFault("the round was given up before its weights were written")
            if is_proven(round_.path):
                round_.is_proven = round_.is_written = True
            self._remove_leftovers(round_)
            round_.write()
        return round_.path

    def push_ended(self, round_: RoundOnDisk, *, proven: bool) -> None:
        """One of the round's pushes is over; after the last one a round without proof goes."""
        with self._changed:
            round_.num_running -= 1
            round_.is_proven |= proven
            is_over = round_.num_running == 0 and not (round_.is_proven and self._keep)
        if is_over:
            self._discard(round_)

    def confirm(self, round_id: str) -> None:
        """All ranks have heard of a proof: from now on its weights are a version of the run. Waits for no disk."""
        round_ = self._round
        if not self._keep or round_ is None or round_id != round_.path.name or round_id == self._confirmed:
            return
        self._confirmed = round_id
        self._keeper = threading.Thread(
            target=self._keep_version, args=(round_,), name="disk-keeper", daemon=True
        )
        self._keeper.start()

    def close(self) -> None:
        """Removes what is no version, within seconds. May be called again."""
        if self._keeper is not None:
            self._keeper.join(_PATIENCE_S)
        round_, self._round = self._round, None
        if round_ is not None and round_.path.name != self._confirmed:
            self._discard(round_)

    def _discard(self, round_: RoundOnDisk) -> None:
        with self._held(_PATIENCE_S) as is_held:
            if is_held and not (self._keep and is_proven(round_.path)):  # else the next round removes it
                _remove(round_.path)

    def _keep_version(self, round_: RoundOnDisk) -> None:
        with self._held(_PATIENCE_S) as is_held:
            if not is_held or not round_.path.is_dir():
                return  # all of its servers had their weights otherwise
            try:
                mark_proven(round_.path, round_.order.version)
                for old in proven_versions(self._directory, round_.order.run_id)[self._keep :]:
                    _remove(old.directory)
            except OSError as error:
                logger.warning("the proven weights in %s cannot be kept: %s", round_.path, error)

    def _remove_leftovers(self, round_: RoundOnDisk) -> None:
        """Of rounds before this one: half written, half removed, or never proven."""
        with suppress(OSError):  # the write that follows says why
            run_id, kept = round_.order.run_id, {self._confirmed}
            if round_.is_written:
                kept.add(round_.path.name)
            for path in rounds_of(self._directory, run_id, hidden=True):
                _delete(path)
            for path in rounds_of(self._directory, run_id):
                if path.name not in kept and not is_proven(path):
                    _remove(path)

    @contextmanager
    def _held(self, timeout_s: float) -> Iterator[bool]:
        is_held = self._files.acquire(timeout=timeout_s)
        try:
            yield is_held
        finally:
            if is_held:
                self._files.release()


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _remove(path: Path) -> None:
    """Takes its name away first: nobody takes a directory that is half removed for a whole one."""
    try:
        os.rename(path, _hidden(path))
        _delete(_hidden(path))
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be removed, and takes up room: %s", path, error)


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()  # what it leads to is not ours
    else:
        shutil.rmtree(path)
