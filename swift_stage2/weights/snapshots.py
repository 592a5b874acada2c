"""Snapshots of the learner's weights: one copy in rank 0's main memory, made anew for each version, on all ranks alike.

Training waits for ``take`` alone: one copy of the weights, which a GPU may only have queued then, and, when due, the
learner's answer to the canary. Rank 0's failure travels as a text in what it returns, because the other ranks must not
be left in a collective. A watch ends the process when the main thread is stuck here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from swift_stage2.collectives import ControlGroup, FatalNotes
from swift_stage2.config import ROUND_MARGIN_S
from swift_stage2.errors import WeightSyncError, WeightSyncHang
from swift_stage2.runtime.background import RoundWatch
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights.copy_stream import CopiesBesideTraining, Copy, CudaCopyStream
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import Canary, CanaryAnswer
from swift_stage2.weights.snapshot import SnapshotFile, WeightIdentity, describe_fault
from swift_stage2.weights.tensors import snapshot_bytes


@dataclass(frozen=True, slots=True)
class TakenSnapshot:
    """The weights of one moment on rank 0. On a GPU the copy may still run: see ``Snapshots.is_copied``."""

    identity: WeightIdentity
    file: SnapshotFile | None
    canary: CanaryAnswer | None
    """The learner's answer under these weights; None if none was due."""
    seconds: float = 0.0
    canary_seconds: float = 0.0
    fault: str = ""
    """Why the learner's weights cannot be pushed; empty if they can."""


class Snapshots:
    """Called on every rank's main thread, at the same step."""

    def __init__(
        self,
        *,
        control: ControlGroup,
        export: WeightExport,
        canary: Canary,
        run_id: str,
        timeout_s: float,
        bucket_mib: float,
        file: SnapshotFile | None = None,
        copy_stream: CudaCopyStream | None = None,
        stages: bool = True,
        span: EnterSpan = untraced,
    ) -> None:
        """``file``: made for the first snapshot unless it is given. ``span`` is entered with the name of every phase.

        ``copy_stream``: by default of the weights' only GPU, where they are copied first if ``stages``.
        """
        self.export = export
        self.on_copied: Callable[[], object] = lambda: None
        """Called by optimizer steps on the main thread, for what waits for the copy."""
        self._control = control
        self._canary = canary
        self._answer: CanaryAnswer | None = None
        self._run_id = run_id
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._span = span
        if copy_stream is None and export.gpu is not None:
            copy_stream = CudaCopyStream(export.gpu, snapshot_bytes(export.manifest()), stages=stages)
        self._copies = CopiesBesideTraining(copy_stream, lambda: self.on_copied())
        self._file = file
        self._fatal_notes = FatalNotes(control)
        self._watch = RoundWatch(timeout_s + ROUND_MARGIN_S, self._fatal_notes.leave_if_none)

    def take(
        self, version: int, *, step: int | None = None, canary_due: bool = False
    ) -> TakenSnapshot | None:
        """Copies the weights of this moment, which must not be read from the copy any more; None on other ranks.

        ``canary_due`` is rank 0's to say.

        Raises:
            WeightSyncHang: another rank has ended because of this.
        """
        with self.explained(), self._watch:
            if self._control.rank > 0:
                self._help()
                return None
            taken = self._take(WeightIdentity(self._run_id, version, step), canary_due)
        if not self.is_copied:
            self._watch.begin("the copy of the weights", self._copies.is_done)
        return taken

    @property
    def is_copied(self) -> bool:
        """Whether the copies into the snapshot have ended, well or not."""
        return self._copies.is_done()

    def wait_copied(self) -> None:
        """Returns when they have. Raises RuntimeError if the device has failed."""
        self._copies.wait()  # deadline: the watch of ``take``

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns a collective's failure into why another rank has left. Raises WeightSyncHang."""
        try:
            yield
        except RuntimeError as error:
            words = self._fatal_notes.read()
            if not words:
                raise
            raise WeightSyncHang(words) from error

    def close(self) -> None:
        """Waits for what is being copied, because the memory is about to go."""
        with self._watch:
            if not self.is_copied:
                self._watch.begin("the copy of the weights")
            self._copies.close()
        self._file = None

    # If no rank holds whole tensors, rank 0 tells the others what comes next: {"canary": whether it is due}, then
    # {"gather": index of a bucket} any number of times, and {"gather": null} at last. So its failure never leaves them
    # in a collective. After a gather every rank says whether it failed there. One that fails inside leaves the others
    # stuck in the training group, where no message reaches them: it leaves a note, and the watches of the others read
    # it and end them.

    def _take(self, identity: WeightIdentity, canary_due: bool) -> TakenSnapshot:
        seconds = canary_seconds = 0.0
        fault = ""
        try:
            if self.export.partitioned:
                self._control.broadcast({"canary": canary_due})
            if canary_due:
                began = time.perf_counter()
                with self._span("canary"):
                    fault = self._answer_canary()
                canary_seconds = time.perf_counter() - began
            if not fault:
                began = time.perf_counter()
                self._copy()
                seconds = time.perf_counter() - began
        except Exception as error:  # rank 0 must reach the next agreement unless a rank has left for good
            if isinstance(error, RuntimeError) and self._fatal_notes.read():
                raise
            fault = describe_fault("the snapshot of the learner's weights", error)
        answer = self._answer if canary_due else None
        return TakenSnapshot(identity, self._file, answer, seconds, canary_seconds, fault)

    def _help(self) -> None:
        if not self.export.partitioned:
            return  # rank 0 works alone
        if self._control.broadcast(None)["canary"] and self._answer_canary():
            return  # as rank 0 has heard
        self._watch.begin("the snapshot of weights")
        plan = self.export.plan(self._bucket_bytes)
        while (index := self._control.broadcast(None)["gather"]) is not None:
            self._take_part("gathering weights", partial(self.export.help_read, plan[index]))

    def _copy(self) -> None:
        try:
            self._watch.begin("the snapshot of weights")
            if self._file is None:
                self._file = SnapshotFile(
                    self.export.manifest(), bucket_bytes=self._bucket_bytes, pinned=self.export.on_gpu
                )
            with self._span("snapshot"):
                self._copies.copy(partial(self._fill, self._file))
        finally:
            if self.export.partitioned:
                self._control.broadcast({"gather": None})

    def _fill(self, snapshot: SnapshotFile, copy: Copy) -> None:
        # What all ranks gather comes in buckets; else one tensor at a time, because a device may have no room for more.
        for index, names in enumerate(self.export.plan(self._bucket_bytes if self.export.partitioned else 1)):
            if self.export.partitioned:
                self._control.broadcast({"gather": index})

            def put(names: Sequence[str] = names) -> None:
                snapshot.put(self.export.read(names), copy)

            if fault := self._take_part("copying the weights", put):
                raise WeightSyncError(fault)

    def _answer_canary(self) -> str:
        """Why the learner's own answer could not be had, if so; on all ranks together under ZeRO-3."""
        together = ", on all ranks together," if self.export.partitioned else ""
        self._watch.begin(f"the learner's canary{together}")

        def ask() -> None:
            self._answer = self._canary.answer()

        return self._take_part("the learner's canary", ask)

    def _take_part(self, what: str, work: Callable[[], object]) -> str:
        """Does what all ranks do together if no rank holds whole tensors; returns on which it failed, and why."""
        fault = ""
        try:
            work()
        except Exception as error:  # a rank must reach the collective below whatever happens
            fault = describe_fault(what, error)
        if not self.export.partitioned:
            return fault
        if fault:  # others may be stuck inside
            self._fatal_notes.leave(fault)
        faults = self._control.gather(fault)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(faults) if text)
