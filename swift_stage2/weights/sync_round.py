"""Runs sync rounds beside training: rank 0 copies the weights, background pushes carry and prove them, all ranks learn.

Training waits for ``begin`` alone: one copy of the weights and, when due, the learner's canary, on every main thread
at the same step. Each server's push has a daemon thread on rank 0. ``finish`` tells every rank the outcome, once
``has_ended`` has travelled in a step's vector. A round is a transaction: rank 0 never raises before every rank knows,
and only what was proven counts. A watch ends the process when the main thread itself is stuck.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from swift_stage2.collectives import ControlGroup
from swift_stage2.config import Proof
from swift_stage2.errors import WeightSyncError, WeightSyncHang
from swift_stage2.process.heap_trim import HeapTrim
from swift_stage2.process.watches import RoundWatch
from swift_stage2.records import RoundOutcome, ServerReport
from swift_stage2.servers import protocol
from swift_stage2.servers.session import Deadline
from swift_stage2.telemetry.trace import EnterSpan, untraced
from swift_stage2.weights.export import WeightExport
from swift_stage2.weights.proof import Canary, CanarySchedule, RoundOrder
from swift_stage2.weights.push import ServerPush, close_quietly, describe_fault
from swift_stage2.weights.snapshot import Snapshot
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

__all__ = ["Canary", "RoundOutcome", "ServerEndpoint", "ServerReport", "WeightSync"]

# Every call of a round ends by this share of its time, so that only a thread that does not return by the
# whole of it is a hang.
_SHARE_FOR_CALLS = 0.8
_CLOSE_TIMEOUT_S = 1.0
_LAST_ROUND_S = 10.0  # for a round that has not ended when training has
_LAST_CALL_S = 5.0  # for one call of a push that was given up
_LEAST_WAIT_S = 1.0  # for pushes that have ended, or are about to
# Over the round's time: only what the deadline on the main thread cannot end lasts so long.
_WATCH_MARGIN_S = 10.0
_MIB = 1 << 20


@dataclass(slots=True)
class _Transfer:
    """On rank 0, from ``begin`` to ``finish``."""

    version: int
    round_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    canary: Canary | None = None
    canary_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    end: float = 0.0  # monotonic; after it a push hangs
    pushes: Sequence[ServerPush] = ()
    learner_fault: str | None = None
    given_up: threading.Event = field(default_factory=threading.Event)

    @property
    def pushes_have_ended(self) -> bool:
        return all(push.finished.is_set() for push in self.pushes)

    def hung(self) -> list[ServerPush]:
        """Waits for the pushes; those that have not returned by the end."""
        # A process that was itself stopped for so long must not call every push hung.
        end = max(self.end, time.monotonic() + _LEAST_WAIT_S)
        return [push for push in self.pushes if not push.finished.wait(max(0.0, end - time.monotonic()))]


class WeightSync:
    """Sync rounds of one run, one at a time; called on every rank's main thread, at the same step."""

    def __init__(
        self,
        endpoints: Sequence[ServerEndpoint],
        *,
        control: ControlGroup,
        export: WeightExport,
        canary: Canary,
        make_transport: Callable[[protocol.ServerInfo], WeightTransport],
        run_id: str,
        timeout_s: float,
        bucket_mib: int,
        proof: Proof = Proof.AUTO,
        canary_every_rounds: int = 1,
        api_key: str | None = None,
        span: EnterSpan = untraced,
        ours: set[str] | None = None,
    ) -> None:
        """``span`` is entered with the name of every phase, on the thread that goes through it.

        ``ours`` are base URLs of servers that were ours in this run, and must stay so; rounds add to them.
        """
        self._ours = set() if ours is None else ours
        self._endpoints = tuple(endpoints)
        self._control = control
        self._export = export
        self._canary = canary
        self._canaries = CanarySchedule(canary_every_rounds)  # rank 0 alone knows what it says
        self._make_transport = make_transport
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_mib * _MIB
        self._proof = proof
        self._api_key = api_key
        self._span = span
        self._transports: dict[int, WeightTransport] = {}
        self._distrusted: set[int] = set()
        self._heap = HeapTrim()
        self._snapshot: Snapshot | None = None
        self._round: _Transfer | None = None
        self._watch = RoundWatch(timeout_s + _WATCH_MARGIN_S, self._leave_word)

    def run(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        """One whole round that brings ``targets`` to ``version``, waited for; raises as ``finish`` does."""
        self.begin(version, targets)
        return self.finish()

    def begin(self, version: int, targets: Sequence[int]) -> None:
        """Copies the weights of this moment and starts a push to each of ``targets``; what fails is told by ``finish``.

        Raises:
            WeightSyncHang: another rank has ended because of this round.
        """
        with self._watched():
            if self._control.rank > 0:
                self._help()
                return
            round_ = self._round = _Transfer(version)
            try:
                self._begin_rank_zero(round_, targets)
            except Exception as error:  # rank 0 must reach ``finish`` unless a rank has left for good
                if isinstance(error, RuntimeError) and self._words():
                    raise
                round_.learner_fault = describe_fault("the sync round", error)
        if not round_.pushes_have_ended:  # a call to a GPU behind a transfer that hangs would stop training
            self._watch.begin("the transfer of weights", lambda: round_.pushes_have_ended)

    @property
    def has_ended(self) -> bool:
        """Whether ``finish`` would not wait; rank 0's fact in the step's vector, False on every other rank."""
        round_ = self._round
        return round_ is not None and (round_.pushes_have_ended or time.monotonic() > round_.end)

    def finish(self) -> RoundOutcome:
        """Ends the round that ``begin`` began; returns the same outcome on every rank. Rank 0 waits for its pushes.

        Raises:
            WeightSyncError: the learner's weights cannot be exported; on every rank.
            WeightSyncHang: a push did not return by ``sync.timeout_s``, or another rank has ended because of
                this round; on every rank that can still raise. Others end with status 70.
        """
        with self._watched():
            # Until every rank has heard of the outcome. The others may wait for the whole of rank 0's first round.
            if self._control.rank == 0:
                self._watch.begin("the transfer of weights")
            told = {"outcome": self._outcome().to_json()} if self._control.rank == 0 else None
            outcome = RoundOutcome.from_json(self._control.broadcast(told)["outcome"])
            if self._control.rank == 0:
                self._heap.after_round()
        if outcome.hung:
            raise WeightSyncHang(outcome.hung)
        if outcome.learner_fault:
            raise WeightSyncError(outcome.learner_fault)
        return outcome

    def distrust(self, servers: Iterable[int]) -> None:
        """Connections to these servers are not used again: they may come back as other processes."""
        for server in servers:
            self._distrusted.add(server)
            self._canaries.forget(server)

    def lost_servers(self) -> tuple[int, ...]:
        """Servers that what is kept between rounds has lost; for the probe's thread, never while a round runs."""
        return tuple(server for server, kept in list(self._transports.items()) if kept.is_lost())

    def close(self) -> None:
        """Ends a round that still runs, after some time for it, and closes what the transports hold."""
        round_, self._round = self._round or _Transfer(0), None
        with self._watch:
            round_.end = min(round_.end, time.monotonic() + _LAST_ROUND_S)
            round_.hung()
            round_.given_up.set()
            for transport in list(self._transports.values()):
                close_quietly(transport, Deadline(_CLOSE_TIMEOUT_S))
            self._transports.clear()
            round_.end = time.monotonic() + _LAST_CALL_S
            round_.hung()  # a thread that the interpreter's end meets inside of torch aborts the process
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
            words = self._words()
            if not words:
                raise
            raise WeightSyncHang(words) from error

    def _begin_rank_zero(self, round_: _Transfer, targets: Sequence[int]) -> None:
        round_.end = time.monotonic() + self._timeout_s
        due = self._proof is not Proof.CHECKSUM and self._canaries.is_due(targets)
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
        snapshot = self._take_snapshot()
        round_.snapshot_seconds = time.perf_counter() - began
        round_.end = time.monotonic() + self._timeout_s
        order = RoundOrder(
            round_id=round_.round_id,
            run_id=self._run_id,
            version=round_.version,
            manifest=self._export.manifest(),
            canary=round_.canary,
            proof=self._proof,
            api_key=self._api_key,
            deadline=Deadline(self._timeout_s * _SHARE_FOR_CALLS),
        )
        buckets = snapshot.buckets(self._bucket_bytes)
        pushes = []
        for server in targets:
            push = ServerPush(
                server,
                self._endpoints[server],
                order,
                buckets,
                self._transports,
                self._make_transport,
                given_up=round_.given_up,
                distrusted=server in self._distrusted,
                ours=self._ours,
                span=self._span,
            )
            self._distrusted.discard(server)
            push.start()
            pushes.append(push)
            round_.pushes = tuple(pushes)  # also if the process may start no more threads

    def _help(self) -> None:
        if not self._export.partitioned:
            return  # rank 0 works alone
        if self._control.broadcast(None)["canary"] and self._answer_canary():
            return  # as rank 0 has heard
        self._watch.begin("the snapshot of weights")
        plan = self._export.plan(self._bucket_bytes)
        while (index := self._control.broadcast(None)["gather"]) is not None:
            self._take_part("gathering weights", partial(self._export.help_read, plan[index]))

    def _take_snapshot(self) -> Snapshot:
        partitioned = self._export.partitioned
        try:
            self._watch.begin("the snapshot of weights")
            if self._snapshot is None:
                self._snapshot = Snapshot(self._export.manifest(), pinned=self._export.on_gpu)
            snapshot = self._snapshot
            with self._span("snapshot"):
                for index, names in enumerate(self._export.plan(self._bucket_bytes)):
                    if partitioned:
                        self._control.broadcast({"gather": index})
                    copy = lambda names=names: snapshot.put(self._export.read(names))  # noqa: E731
                    if fault := self._take_part("copying the weights", copy):
                        raise WeightSyncError(fault)
        finally:
            if partitioned:
                self._control.broadcast({"gather": None})
        return snapshot

    def _outcome(self) -> RoundOutcome:
        """Rank 0's, once its pushes have ended or their time is over."""
        round_, self._round = self._round, None
        if round_ is None:
            raise RuntimeError("a round must begin before it can finish")
        if hung := round_.hung():
            for push in hung:  # its thread is inside the transport: to close it could hang as well
                self._transports.pop(push.server, None)
            names = ", ".join(push.name for push in hung)
            text = f"{names} did not return within {self._timeout_s} s"
            return RoundOutcome(round_.round_id, round_.version, hung=text)
        reports = {push.server: self._still(push) for push in round_.pushes if push.report is not None}
        for server, report in reports.items():
            # A server that was lost while the round ran may be another process by now.
            by_checksums = report.proven and "checksums" in report.proof and server not in self._distrusted
            self._canaries.record(server, asked=round_.canary is not None, by_checksums=by_checksums)
        faults = (push.learner_fault for push in round_.pushes if push.learner_fault)
        return RoundOutcome(
            round_.round_id,
            round_.version,
            reports=reports,
            learner_fault=round_.learner_fault or next(faults, None),
            seconds=time.monotonic() - round_.started,
            canary_seconds=round_.canary_seconds,
            snapshot_seconds=round_.snapshot_seconds,
        )

    def _still(self, push: ServerPush) -> ServerReport:
        """The push's report; a server that was lost since its proof has none."""
        assert push.report is not None
        kept = self._transports.get(push.server)
        if not push.report.proven or kept is None or not kept.is_lost():
            return push.report
        return replace(
            push.report, proven=False, error=f"{push.base_url} was lost after it had proven the weights"
        )

    def _answer_canary(self) -> str:
        """Why the learner's own answer could not be had, if so; on all ranks together under ZeRO-3."""
        if self._export.partitioned:
            self._watch.begin("the learner's canary, on all ranks together,")
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
            self._control.notes.write(_note_of(self._control.rank), f"rank {self._control.rank}: {fault}")
        faults = self._control.gather(fault)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(faults) if text)

    def _leave_word(self, hang: str) -> str:
        """Tells the other ranks why this one ends, unless a rank has said more; returns what is known."""
        notes, rank = self._control.notes, self._control.rank
        if notes.read(_note_of(rank)) is None:
            notes.write(_note_of(rank), f"rank {rank}: {hang}")
        return self._words()

    def _words(self) -> str:
        """Last words of ranks that have ended; empty if none has."""
        said = (self._control.notes.read(_note_of(rank)) for rank in range(self._control.world_size))
        return "; ".join(text for text in said if text)


def _note_of(rank: int) -> str:
    return f"end of rank {rank}"
