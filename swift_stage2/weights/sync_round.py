"""Runs one sync round: rank 0 reads full weights once for all servers, proves them, and tells every rank.

The first barrier, that every rank is drained, is the learner's; the second is the broadcast of the outcome
here. A round is a transaction: rank 0 never raises before that broadcast, and only what was proven counts.
Weights are read and the deadline is kept on the main thread; each server's push has a daemon thread. A watch
ends the process when the main thread itself is stuck.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

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
from swift_stage2.weights.proof import Canary, RoundOrder
from swift_stage2.weights.push import BucketHandover, ServerPush, close_quietly, describe_fault
from swift_stage2.weights.tensors import BucketMemory, WeightBucket
from swift_stage2.weights.transport import ServerEndpoint, WeightTransport

__all__ = ["Canary", "RoundOutcome", "ServerEndpoint", "ServerReport", "WeightSync"]

# Every call of a round ends by this share of its time, so that only a thread that does not return by the
# whole of it is a hang.
_SHARE_FOR_CALLS = 0.8
# Of the calls' time: for so long one server may keep others without a bucket, and the learner's own reading
# may take no more of a round that ran out of time.
_SHARE_FOR_ONE = 0.5
_CLOSE_TIMEOUT_S = 1.0
_LEAST_WAIT_S = 1.0  # for pushes that have ended, or are about to
# Over the round's time: only what the deadline on the main thread cannot end lasts so long.
_WATCH_MARGIN_S = 10.0
_MIB = 1 << 20


class WeightSync:
    """Sync rounds of one run. ``run`` is called on every rank's main thread, at the same step."""

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
        self._memory = BucketMemory()
        self._watch = RoundWatch(timeout_s + _WATCH_MARGIN_S, self._leave_word)

    def run(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        """One round that brings ``targets`` to ``version``; returns the same outcome on every rank.

        Raises:
            WeightSyncError: the learner's weights cannot be exported; on every rank.
            WeightSyncHang: a push did not return by ``sync.timeout_s``, or another rank has ended because of
                this round; on every rank that can still raise. Others end with status 70.
        """
        try:
            with self._watch:
                outcome = self._lead(version, targets) if self._control.rank == 0 else self._follow()
        except RuntimeError as error:  # of a collective that another rank has left
            words = self._words()
            if not words:
                raise
            raise WeightSyncHang(words) from error
        if outcome.hung:
            raise WeightSyncHang(outcome.hung)
        if outcome.learner_fault:
            raise WeightSyncError(outcome.learner_fault)
        return outcome

    def distrust(self, servers: Iterable[int]) -> None:
        """Connections to these servers are not used again: they may come back as other processes."""
        self._distrusted.update(servers)

    def lost_servers(self) -> tuple[int, ...]:
        """Servers that what is kept between rounds has lost; for the probe's thread, never while a round runs."""
        return tuple(server for server, kept in list(self._transports.items()) if kept.is_lost())

    def close(self) -> None:
        """Closes what the transports still hold."""
        for transport in self._transports.values():
            close_quietly(transport, Deadline(_CLOSE_TIMEOUT_S))
        self._transports.clear()

    # Rank 0 tells the others what comes next: {"gather": index of a bucket} any number of times, if no rank
    # holds whole tensors, and {"outcome": …} at last. So its failure never leaves them in a collective. After a
    # gather every rank says whether it failed there. One that fails inside leaves the others stuck in the training
    # group, where no message reaches them: it leaves a note, and the watches of the others read it and end them.

    def _lead(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        try:
            outcome = self._run_rank_zero(version, targets)
        except Exception as error:  # rank 0 must reach the broadcast whatever happens
            fault = describe_fault("the sync round", error)
            outcome = RoundOutcome(uuid.uuid4().hex, version, learner_fault=fault)
        self._control.broadcast({"outcome": outcome.to_json()})
        self._heap.after_round()
        return outcome

    def _follow(self) -> RoundOutcome:
        if self._export.partitioned:  # else rank 0 works alone, and its end shows in the broadcast
            self._answer_canary()
            self._watch.begin("the transfer of weights")
        plan = self._export.plan(self._bucket_bytes)
        while True:
            message = self._control.broadcast(None)
            if "outcome" in message:
                return RoundOutcome.from_json(message["outcome"])
            names = plan[message["gather"]]
            self._take_part("gathering weights", partial(self._export.help_read, names))

    def _run_rank_zero(self, version: int, targets: Sequence[int]) -> RoundOutcome:
        started = time.perf_counter()
        round_id = uuid.uuid4().hex
        with self._span("canary"):
            canary_fault = self._answer_canary()
        if canary_fault:
            return RoundOutcome(round_id, version, learner_fault=canary_fault)
        self._watch.begin("the transfer of weights")  # also until every rank has heard of the outcome
        canary_seconds = time.perf_counter() - started
        end = time.monotonic() + self._timeout_s
        order = RoundOrder(
            round_id=round_id,
            run_id=self._run_id,
            version=version,
            manifest=self._export.manifest(),
            canary=self._canary,
            proof=self._proof,
            api_key=self._api_key,
            deadline=Deadline(self._timeout_s * _SHARE_FOR_CALLS),
        )
        handover: BucketHandover[WeightBucket] = BucketHandover(
            targets, order.deadline, patience_s=self._timeout_s * _SHARE_FOR_CALLS * _SHARE_FOR_ONE
        )
        pushes = [self._new_push(server, order, handover) for server in targets]
        export_seconds, fault = self._start_and_feed(pushes, order.deadline, handover)
        # A process that was itself stopped for so long must not call every push hung.
        end = max(end, time.monotonic() + _LEAST_WAIT_S)
        hung = [push for push in pushes if not push.finished.wait(max(0.0, end - time.monotonic()))]
        if hung:
            for push in hung:  # its thread is inside the transport: to close it could hang as well
                self._transports.pop(push.server, None)
            names = ", ".join(push.name for push in hung)
            return RoundOutcome(round_id, version, hung=f"{names} did not return within {self._timeout_s} s")
        return RoundOutcome(
            round_id,
            version,
            reports={push.server: push.report for push in pushes if push.report is not None},
            learner_fault=fault or next((push.learner_fault for push in pushes if push.learner_fault), None),
            seconds=time.perf_counter() - started,
            canary_seconds=canary_seconds,
            export_seconds=export_seconds,
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

    def _new_push(self, server: int, order: RoundOrder, handover: BucketHandover[WeightBucket]) -> ServerPush:
        distrusted = server in self._distrusted
        self._distrusted.discard(server)
        return ServerPush(
            server,
            self._endpoints[server],
            order,
            handover,
            self._transports,
            self._make_transport,
            distrusted=distrusted,
            ours=self._ours,
            span=self._span,
        )

    def _start_and_feed(
        self, pushes: Sequence[ServerPush], deadline: Deadline, handover: BucketHandover[WeightBucket]
    ) -> tuple[float, str | None]:
        """Starts the pushes and hands them every bucket; returns the seconds of reading, and the learner's fault."""
        seconds = 0.0
        try:
            for push in pushes:
                push.start()
            for index, names in enumerate(self._export.plan(self._bucket_bytes)):
                started = time.perf_counter()
                with self._span("export"):
                    bucket = self._read(index, names)
                seconds += time.perf_counter() - started
                self._require_time_left(deadline, seconds)
                if not handover.offer(bucket):
                    break
            handover.finish()
        except Exception as error:  # the pushes must end, and rank 0 must reach the broadcast
            fault = describe_fault("the export of the learner's weights", error)
            handover.fail(fault)
            for push in pushes:
                if push.ident is None:  # the process may start no more threads
                    push.finished.set()
            return seconds, fault
        return seconds, None

    def _read(self, index: int, names: Sequence[str]) -> WeightBucket:
        if not self._export.partitioned:
            return WeightBucket(self._export.read(names), self._memory)
        self._control.broadcast({"gather": index})
        tensors: list[tuple[str, torch.Tensor]] = []
        fault = self._take_part("gathering weights", lambda: tensors.extend(self._export.read(names)))
        if fault:
            raise WeightSyncError(fault)
        return WeightBucket(tensors, self._memory)

    def _require_time_left(self, deadline: Deadline, export_seconds: float) -> None:
        """A round that ran out of time is the learner's fault if the time went into reading its weights."""
        if deadline.expired and export_seconds > self._timeout_s * _SHARE_FOR_CALLS * _SHARE_FOR_ONE:
            raise WeightSyncError(
                f"weights must be exported well within rollout.sync.timeout_s={self._timeout_s:g}, got "
                f"{export_seconds:.1f} s for a part of them; raise it"
            )


def _note_of(rank: int) -> str:
    return f"end of rank {rank}"
