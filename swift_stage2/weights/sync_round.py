"""Runs sync rounds beside training: rank 0 copies the weights, a courier carries and proves them, all ranks learn.

Training waits for ``begin`` alone, on every main thread at the same step: one copy of the weights, which a GPU may only
have queued then, and, when due, the learner's canary. Rank 0's courier takes the copy to the servers once it is done.
``hear`` tells every rank what has come of it, once ``has_news`` has travelled in a step's vector. A round is a
transaction: rank 0 never raises before every rank knows, and only what was proven counts. The copy is kept until the
next one: ``catch_up`` has it pushed to servers that come late. A watch ends the process when the main thread is stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from swift_stage2.collectives import ControlGroup, LastWords
from swift_stage2.config import ROUND_MARGIN_S, OnPending, Proof
from swift_stage2.errors import WeightSyncError, WeightSyncHang
from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.runtime.memory import HeapTrim
from swift_stage2.runtime.watches import RoundWatch
from swift_stage2.servers.session import Deadline
from swift_stage2.telemetry.timing import EnterSpan, untraced
from swift_stage2.weights.copy_stream import CopiesBesideTraining, Copy, CudaCopyStream
from swift_stage2.weights.courier import Courier, PushEnd
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import Canary, CanarySchedule, RoundOrder
from swift_stage2.weights.push import describe_fault
from swift_stage2.weights.snapshot import SnapshotFile
from swift_stage2.weights.tensors import snapshot_bytes
from swift_stage2.weights.transfer import Transfer

_SHARE_FOR_CALLS = 0.8  # of a round's time: only what hangs has to be given up at the whole of it
_SHARE_FOR_HOLD = 0.5 * _SHARE_FOR_CALLS  # so long an evaluation may hold installs
_SHARE_FOR_TURN = 0.5  # of what a server has for its install, which then takes as long as the first one's
_LAST_ROUND_S = 10.0  # for a round that has not ended when training has
_LEAST_WAIT_S = 1.0  # for pushes that have ended, or are about to
_LOOK_S = 0.1  # for a first proof, in a round that is waited for


class WeightSync:
    """Sync rounds of one run, one at a time; called on every rank's main thread, at the same step."""

    def __init__(
        self,
        *,
        control: ControlGroup,
        export: WeightExport,
        canary: Canary,
        courier: Courier,
        run_id: str,
        timeout_s: float,
        straggler_s: float | None = None,
        bucket_mib: int,
        proof: Proof = Proof.AUTO,
        canary_every_rounds: int = 1,
        on_pending: OnPending = OnPending.WAIT,
        rolling: bool = True,
        snapshot: SnapshotFile | None = None,
        copy_stream: CudaCopyStream | None = None,
        stages: bool = True,
        span: EnterSpan = untraced,
    ) -> None:
        """``span`` is entered with the name of every phase on the main thread.

        ``straggler_s``: what other servers have after the first proof, by default all of ``timeout_s``. ``snapshot``:
        made for the first round unless it is given. ``copy_stream``: by default of the weights' only GPU, where they
        are copied first if ``stages``.
        """
        self._control = control
        self._export = export
        self._canary = canary
        self._canaries = CanarySchedule(canary_every_rounds)  # rank 0 alone knows what it says
        self._courier = courier
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._straggler_s = timeout_s if straggler_s is None else straggler_s
        self._bucket_bytes = bucket_mib * 2**20
        self._proof = proof
        self._on_pending = on_pending
        least_s = min(self._straggler_s, timeout_s * _SHARE_FOR_CALLS)
        self._turn_s = least_s * _SHARE_FOR_TURN if rolling else 0.0
        self._span = span
        if copy_stream is None and export.gpu is not None:
            copy_stream = CudaCopyStream(export.gpu, snapshot_bytes(export.manifest()), stages=stages)
        self._copies = CopiesBesideTraining(copy_stream, self._hand_over)
        self._distrusted: set[int] = set()  # since the round began
        self._heap = HeapTrim()
        self._snapshot = snapshot
        self._round: Transfer | None = None
        self._kept: Transfer | None = None  # whose weights the snapshot is of, once one server is proven
        self._last_words = LastWords(control)
        self._watch = RoundWatch(timeout_s + ROUND_MARGIN_S, self._last_words.leave_if_none)

    def run(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        """One whole round that brings ``targets`` to ``version``, waited for; raises as ``hear`` does."""
        self.begin(version, targets)
        return self.hear()

    def begin(
        self,
        version: int,
        targets: Sequence[int],
        *,
        staged: bool = False,
        held: bool = False,
        step: int | None = None,
    ) -> None:
        """Copies the weights of this moment and starts a push to each of ``targets``; ``hear`` tells what fails.

        On a GPU the copy may still run when this returns: the next optimizer step is queued behind it, and pushes start
        at the first later call that finds it done. ``staged``: servers of ours alone, asked on until they install.
        ``held``: they install after ``let_install``, or half of the calls' time. A disk keeps ``step`` beside weights.

        Raises:
            WeightSyncHang: another rank has ended because of this round.
        """
        with self._watched():
            if self._control.rank > 0:
                self._help()
                return
            round_ = self._transfer(version, staged, targets, step)
            self._round, self._kept, round_.held = round_, None, held
            self._distrusted.clear()
            try:
                self._begin_rank_zero(round_)
            except Exception as error:  # rank 0 must reach ``hear`` unless a rank has left for good
                if isinstance(error, RuntimeError) and self._last_words.read():
                    raise
                round_.learner_fault = describe_fault("the sync round", error)
        if not self._copies.is_done():
            self._watch.begin("the copy of the weights", self._copies.is_done)

    def catch_up(self, targets: Sequence[int], *, version: int) -> None:
        """Starts a push of the last round's weights to ``targets``, servers of ours; ``hear`` tells of it, too.

        Its canary is that round's: where none was due checksums prove, and the next round asks one. Nothing waits.

        Raises:
            RuntimeError: the weights of ``version`` are not kept, or no server has proven them.
        """
        if self._control.rank > 0:
            return
        if (kept := self._kept) is None or kept.version != version:
            raise RuntimeError(f"only weights that are kept and proven can be brought, got version={version}")
        self._round = replace(
            self._transfer(version, True, targets, kept.step),
            canary=kept.canary,
            is_catch_up=True,
        )
        self._distrusted.clear()
        self._hand_over()

    def hurry(self) -> None:
        """A round waits for the catch-up that runs, which has from now on what stragglers of a round have."""
        if self._round is not None:
            self._round.shorten("the moment at which a round fell due")

    def let_install(self) -> None:
        """Ends the hold of the round in transfer, if there is one."""
        if self._round is not None and self._round.held:
            self._round.held = False
            if self._round.pushed:
                self._courier.let_install()

    @property
    def has_news(self) -> bool:
        """Whether ``hear`` would tell something without a wait; rank 0's fact in the step's vector, else False."""
        self._courier.revive()  # here, because a process ends with the thread that starts it
        round_ = self._round
        if round_ is None or not self._hand_over():
            return False
        ends = self._ends(round_)
        return round_.has_ended(ends) or (round_.staged and ends.keys() - round_.told != set())

    def hear(self) -> RoundOutcome:
        """Tells what has come of the round, alike on every rank; of a staged one as soon as some servers are through.

        Of any other one, or when nothing is there to tell, rank 0 waits for its end.

        Raises:
            WeightSyncError: the learner's weights cannot be exported; on every rank.
            WeightSyncHang: another rank has ended because of this round.
        """
        with self._watched():
            # Until every rank has heard of the outcome. The others may wait for the whole of rank 0's first round.
            if self._control.rank == 0:
                self._watch.begin("the transfer of weights")
            told = {"outcome": self._outcome().to_json()} if self._control.rank == 0 else None
            outcome = RoundOutcome.from_json(self._control.broadcast(told)["outcome"])
            if self._control.rank == 0 and outcome.proven:
                self._courier.confirm(outcome.version)
            if self._control.rank == 0 and outcome.ended:
                self._heap.after_round()
        if outcome.learner_fault:
            raise WeightSyncError(outcome.learner_fault)
        return outcome

    def distrust(self, servers: Iterable[int]) -> None:
        """Connections to these servers are not used again: they may come back as other processes."""
        servers = tuple(servers)
        self._distrusted.update(servers)
        self._courier.distrust(servers)
        for server in servers:
            self._canaries.forget(server)

    def lost_servers(self) -> tuple[int, ...]:
        """Servers that what is kept between rounds has lost; for the probe's thread, never while a round runs.

        None in a catch-up, which uses what is kept, too; no stock server is asked then.
        """
        return () if self._round is not None else self._courier.lost_servers()

    def close(self) -> None:
        """Ends a round that still runs, after some time for it, and closes what the courier holds."""
        round_, self._round = self._round, None
        with self._watch:
            if not self._copies.is_done():
                self._watch.begin("the copy of the weights")
            self._copies.close()  # the memory that they fill is about to go
            if round_ is not None and round_.pushed:
                self._courier.wait(min(round_.end - time.monotonic(), _LAST_ROUND_S))
            self._courier.close()
        self._snapshot = None

    # If no rank holds whole tensors, rank 0 tells the others what comes next: {"canary": whether it is due}, then
    # {"gather": index of a bucket} any number of times, and {"gather": null} at last. So its failure never leaves them
    # in a collective. After a gather every rank says whether it failed there. One that fails inside leaves the others
    # stuck in the training group, where no message reaches them: it leaves a note, and the watches of the others read
    # it and end them.

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            with self._watch:
                yield
        except RuntimeError as error:  # of a collective that another rank has left
            words = self._last_words.read()
            if not words:
                raise
            raise WeightSyncHang(words) from error

    def _begin_rank_zero(self, round_: Transfer) -> None:
        due = self._proof is not Proof.CHECKSUM and self._canaries.is_due(round_.targets)
        if self._export.partitioned:
            self._control.broadcast({"canary": due})
        if due:
            round_.canary = self._canary
            began = time.perf_counter()
            with self._span("canary"):
                fault = self._answer_canary()
            round_.canary_seconds = time.perf_counter() - began
            if fault:
                round_.learner_fault = fault
                return
        began = time.perf_counter()
        self._take_snapshot()
        round_.snapshot_seconds = time.perf_counter() - began
        self._hand_over()

    def _hand_over(self, *, wait: bool = False) -> bool:
        """The courier gets the snapshot once the copies into it are done; False while they are not."""
        round_ = self._round
        if round_ is None or round_.pushed or round_.learner_fault is not None:
            return True
        if not (wait or self._copies.is_done()):
            return False
        try:
            self._copies.wait()  # deadline: the watch of ``begin`` and ``hear``
            round_.start_time()
            order = RoundOrder(
                run_id=self._run_id,
                version=round_.version,
                manifest=self._export.manifest(),
                canary=round_.canary,
                proof=self._proof,
                deadline=Deadline(self._timeout_s * _SHARE_FOR_CALLS),
                on_pending=self._on_pending,
                hold=Deadline(self._timeout_s * _SHARE_FOR_HOLD) if round_.held else None,
                turn_s=self._turn_s if round_.staged else 0.0,
                step=round_.step,
            )
            assert self._snapshot is not None
            round_.pushed = True
            self._courier.begin(order, round_.targets, self._snapshot)
        except Exception as error:  # rank 0 must reach ``hear``
            round_.learner_fault = describe_fault("the sync round", error)
        return True

    def _help(self) -> None:
        if not self._export.partitioned:
            return  # rank 0 works alone
        if self._control.broadcast(None)["canary"] and self._answer_canary():
            return  # as rank 0 has heard
        self._watch.begin("the snapshot of weights")
        plan = self._export.plan(self._bucket_bytes)
        while (index := self._control.broadcast(None)["gather"]) is not None:
            self._take_part("gathering weights", partial(self._export.help_read, plan[index]))

    def _take_snapshot(self) -> None:
        try:
            self._watch.begin("the snapshot of weights")
            if self._snapshot is None:
                self._snapshot = SnapshotFile(
                    self._export.manifest(), bucket_bytes=self._bucket_bytes, pinned=self._export.on_gpu
                )
            with self._span("snapshot"):
                self._copies.copy(partial(self._fill, self._snapshot))
        finally:
            if self._export.partitioned:
                self._control.broadcast({"gather": None})

    def _fill(self, snapshot: SnapshotFile, copy: Copy) -> None:
        # What all ranks gather, one of them cannot gather once more.
        take = partial(snapshot.take, self._export.read, copy=copy, at_once=self._export.partitioned)
        for index, names in enumerate(self._export.plan(self._bucket_bytes)):
            if self._export.partitioned:
                self._control.broadcast({"gather": index})
            if fault := self._take_part("copying the weights", partial(take, names)):
                raise WeightSyncError(fault)

    def _transfer(self, version: int, staged: bool, targets: Sequence[int], step: int | None) -> Transfer:
        return Transfer(version, staged, targets, self._timeout_s, self._straggler_s, step)

    def _ends(self, round_: Transfer) -> Mapping[int, PushEnd]:
        return self._courier.ends() if round_.pushed else {}

    def _all_end(self, round_: Transfer) -> bool:
        """Waits until all pushes have ended; False when their time, which the first proof shortens, is over."""
        # A process that was itself stopped for so long must not call every push late.
        least_end = time.monotonic() + _LEAST_WAIT_S
        while not self._courier.wait(_LOOK_S):
            if round_.has_ended(self._ends(round_)) and time.monotonic() > least_end:
                return False
        return True

    def _outcome(self) -> RoundOutcome:
        """Rank 0's, of the pushes that have ended; once all have, or their time is over, the round's end."""
        round_ = self._round
        if round_ is None:
            raise RuntimeError("a round must begin before anything is heard of it")
        self._hand_over(wait=True)
        ends = self._ends(round_)
        is_partial = round_.staged and ends.keys() - round_.told and not round_.has_ended(ends)
        if not is_partial and round_.learner_fault is None:
            if not self._all_end(round_):
                self._courier.give_up(f"the server did not take and prove the weights within {round_.limit}")
            ends = self._ends(round_)
        if not is_partial:
            self._round = None
        reports = {
            server: self._still(server, each.report) for server, each in sorted(ends.items()) if each.report
        }
        news = tuple(server for server in reports if server not in round_.told)
        round_.told.update(news)
        for server in news:  # one that was lost while the round ran may be another process by now
            report = reports[server]
            by_checksums = report.proven and "checksums" in report.proof and server not in self._distrusted
            self._canaries.record(server, asked=round_.canary is not None, by_checksums=by_checksums)
        if not (is_partial or round_.is_catch_up) and any(report.proven for report in reports.values()):
            self._kept = round_
        faults = (each.learner_fault for each in ends.values() if each.learner_fault)
        return round_.outcome(reports, news, ended=not is_partial, fault=next(faults, None))

    def _still(self, server: int, report: ServerReport) -> ServerReport:
        """The report; a server that was lost since its proof has none."""
        if not report.proven or not self._courier.is_lost(server):
            return report
        return replace(report, proven=False, error="the server was lost after it had proven the weights")

    def _answer_canary(self) -> str:
        """Why the learner's own answer could not be had, if so; on all ranks together under ZeRO-3."""
        together = ", on all ranks together," if self._export.partitioned else ""
        self._watch.begin(f"the learner's canary{together}")
        return self._take_part("the learner's canary", self._canary.answer)

    def _take_part(self, what: str, work: Callable[[], object]) -> str:
        """Does what all ranks do together if no rank holds whole tensors; returns on which it failed, and why."""
        fault = ""
        try:
            work()
        except Exception as error:  # a rank must reach the collective below whatever happens
            fault = describe_fault(what, error)
        if not self._export.partitioned:
            return fault
        if fault:  # others may be stuck inside
            self._last_words.leave(fault)
        faults = self._control.gather(fault)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(faults) if text)
