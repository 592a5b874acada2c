"""Decides every optimizer step on the main thread: round if due, reserve, agree, then channel A or B packs.

All ranks call ``begin_step`` at the same step and reach the same decision, because every rank-local fact
travels in one vector and nothing else is consulted. Knows no ms-swift; called by the trainer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swift_stage2.channel_b.pipeline import Pipeline, StepView
from swift_stage2.channel_b.ready_queue import ReadyQueue, Reservation
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.collectives import ControlGroup
from swift_stage2.errors import ChannelBStarved, PipelineFailed, Stage2Error
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.fence import InferFence
from swift_stage2.process.background import BackgroundFailures
from swift_stage2.records import Pack, RoundOutcome, StepRecord
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.feasibility_gate import GateOutcome, RankFacts, decide
from swift_stage2.scheduling.pacing import Pacer, max_prompts_in_flight
from swift_stage2.scheduling.round_schedule import RoundSchedule
from swift_stage2.scheduling.step_plan import Channel, StepPlan
from swift_stage2.scheduling.version_clock import VersionClock
from swift_stage2.scheduling.watches import StarvationWatch, TruncationGuard
from swift_stage2.servers.pending_abort import PendingAbort
from swift_stage2.servers.probe import SuspectProbe
from swift_stage2.weights.sync_round import WeightSync

logger = logging.getLogger(__name__)

_SMOOTHING = 0.2  # weight of the newest step in the moving average of step seconds
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class StepDecision:
    """One step's plan and this rank's packs for it, and whether the run ends after it."""

    plan: StepPlan
    packs: tuple[Pack, ...]
    stop: bool


class LearnerEvents(Protocol):
    """Where the learner reports what happened; implemented by the telemetry side."""

    def activity(self, name: str) -> AbstractContextManager[None]: ...

    def record_step(self, facts: StepRecord) -> None: ...

    def record_losses(self, step: int, losses: Sequence[str]) -> None: ...

    def record_round(self, step: int, outcome: RoundOutcome, pending_seconds: float) -> None: ...

    def record_warning(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelB:
    """Everything of this rank that exists only when ``b_ratio`` is above 0."""

    source: SampleSource
    client: RolloutClient
    queue: ReadyQueue[Pack]
    pipeline: Pipeline
    fence: InferFence
    clock: VersionClock
    pacer: Pacer
    guard: TruncationGuard
    rounds: RoundSchedule
    sync: WeightSync
    probe: SuspectProbe
    abort: PendingAbort
    base_urls: tuple[str, ...]
    max_inflight_per_server: int
    min_ready_tokens: int
    continue_on_failure: bool
    evaluation: PinnedEvaluation | None = None
    answer_spelling: Sequence[str] = ()
    """How targets are written; a resumed run must write them alike."""


class Learner:
    """One rank's decisions. Without a ``ChannelB`` every step is channel A and only a stop is agreed."""

    def __init__(
        self,
        *,
        b_ratio: float,
        control: ControlGroup,
        events: LearnerEvents,
        starvation: StarvationWatch | None,
        fail_when_starved: bool,
        channel_b: ChannelB | None,
        failures: BackgroundFailures | None = None,
    ) -> None:
        """``failures`` are of threads that nobody waits for; every step tells the new ones."""
        self._failures = failures or BackgroundFailures()
        self._b_ratio = b_ratio
        self._control = control
        self._events = events
        self._starvation = starvation
        self._fail_when_starved = fail_when_starved
        self._b = channel_b
        # Without a lock: a signal handler sets it, and a second signal may interrupt the first one's.
        self._stop_requested = False
        self._missed_in_a_row = 0
        self._paused = False
        self._last_begin_s: float | None = None
        self._step_seconds: float | None = None
        self._pending_since: float | None = None  # moment at which the pending round fell due
        self._pending_seconds = 0.0  # of the round in transfer

    def start(self) -> None:
        """Starts the background threads. The fence stays closed until the first round has proven a server."""
        self._failures.watch()
        if self._b is not None:
            self._b.probe.start()
            self._b.pipeline.start()

    def request_stop(self) -> None:
        """Asks all ranks to stop at the end of the next step they agree on; safe in a signal handler."""
        self._stop_requested = True

    def begin_step(self, step: int, num_packs: int) -> StepDecision:
        """Begins a due round, agrees with all ranks on this step's channel, and finishes a round that has ended.

        ``num_packs`` is the number of micro_steps of the window, the same on all ranks.

        Raises:
            WeightSyncError: the learner's weights cannot be exported.
            WeightSyncHang: a push did not return by its deadline.
            PipelineFailed: a pipeline died somewhere and the configuration asks to fail.
            ChannelBStarved: B starved and the configuration asks to fail.
        """
        self._measure_step()
        for failure in self._failures.take():
            self._events.record_warning(failure)
        if self._b is not None:
            self._begin_round_if_due(self._b, step)
        started = time.perf_counter()
        wants_b = self._b is not None and wants_channel_b(step, self._b_ratio)
        reservation = self._reserve(num_packs) if wants_b else None
        outcome = self._agree(reservation)
        round_ = self._hear_of_round(self._b, reservation) if self._b and outcome.round_ended else None
        plan = outcome.plan(wants_b=wants_b)
        packs = self._spend(step, reservation, plan)
        facts = self._step_record(step, plan, packs)
        seconds = time.perf_counter() - started
        if self._b is not None:
            self._take_in_suspects(self._b, step, outcome.servers_suspect, outcome.servers_answer_again)
            if round_ is not None:  # after this step's packs were taken, so that none ages between the two
                self._finish_round(self._b, step, round_)
        self._publish(step, outcome, wants_b=wants_b, reserved=reservation is not None)
        self._events.record_step(replace(facts, plan_seconds=seconds))
        self._raise_failures(outcome)
        self._watch_starvation(plan)
        return StepDecision(plan, packs, outcome.stop_requested)

    def end_step(self, step: int, losses: Sequence[str]) -> None:
        """``step`` has trained; the losses of its micro_steps as ``float.hex``, where the run records them."""
        self._events.record_losses(step, losses)

    def checkpoint(self, *, step: int, save_id: str) -> dict[str, Any]:
        """This rank's state for a run resumed before ``step``, besides the trainer's own, as JSON."""
        if self._b is None:
            return {}
        source = self._b.source.checkpoint(step=step, save_id=save_id)
        unfinished = self._b.evaluation.unfinished if self._b.evaluation is not None else None
        return {
            "version": self._b.clock.current,
            "source": source,
            "unfinished_evaluation": unfinished,
            "answer_spelling": list(self._b.answer_spelling),
        }

    def close(self) -> None:
        """Ends the threads in the one order that cannot abort the process: stop, HTTP, join, communicator."""
        self._failures.stop()
        b = self._b
        if b is None:
            return
        b.pipeline.stop(0.0)  # first, so that what the others refuse it from now on is no failure
        b.client.request_stop()
        b.fence.shutdown()
        b.queue.close()
        b.client.close()
        if not b.pipeline.stop(_STOP_TIMEOUT_S):
            self._events.record_warning(f"the pipeline's thread did not end within {_STOP_TIMEOUT_S:.0f} s")
        b.probe.stop()
        b.abort.stop()
        b.sync.close()

    def _begin_round_if_due(self, b: ChannelB, step: int) -> None:
        if b.evaluation is not None and b.rounds.falls_due(step) and b.evaluation.holds_round(step):
            return
        if not b.rounds.is_due(step):
            return
        if self._pending_since is None:
            self._pending_since = time.monotonic()
        b.fence.close()
        # In this order: a lane that gives up an abandoned POST makes its server suspect in the same moment.
        busy = b.fence.in_flight > 0 or b.client.num_unsettled > 0
        suspects = b.client.suspects
        vector = [int(busy), *(int(url in suspects) for url in b.base_urls)]
        any_busy, *suspect = self._control.reduce_max(vector)
        # Such a server may still compute: it must be out of this very round, not of the next.
        self._take_in_suspects(b, step, [flag > 0 for flag in suspect], [False] * len(suspect))
        if any_busy:
            # Every rank's fence is closed by now, so that nothing enters behind an abort.
            b.abort.ask([b.base_urls[index] for index in b.rounds.proven], b.clock.current)
            return  # stays pending; training goes on
        targets = b.rounds.targets(step)
        b.rounds.begin()
        if not targets:
            b.rounds.finish(step, proven=(), failed=())
            self._pending_since = None
            return
        self._pending_seconds = time.monotonic() - self._pending_since
        self._pending_since = None
        b.probe.pause()
        with self._events.activity("syncing"):
            b.sync.begin(b.clock.current + 1, targets)
        if b.rounds.is_first:
            self._finish_round(b, step, self._hear_of_round(b, None))

    def _hear_of_round(self, b: ChannelB, reservation: Reservation[Pack] | None) -> RoundOutcome:
        """Called while packs are reserved and not yet spent: it may raise, and then they were not trained."""
        try:
            with self._events.activity("syncing"):
                return b.sync.finish()
        except Stage2Error:
            if reservation is not None:
                reservation.release()
            raise

    def _finish_round(self, b: ChannelB, step: int, outcome: RoundOutcome) -> None:
        b.probe.go_on()
        if outcome.proven:
            b.clock.advance()
        b.rounds.finish(step, proven=outcome.proven, failed=outcome.failed)
        stamps = {b.base_urls[index]: report.incarnation for index, report in outcome.reports.items()}
        b.client.set_proven([b.base_urls[index] for index in b.rounds.proven], stamps)
        b.probe.watch([b.base_urls[index] for index in b.rounds.suspects])
        if b.rounds.proven:
            b.fence.reopen(b.clock.current)
        self._events.record_round(step, outcome, self._pending_seconds)

    def _take_in_suspects(
        self, b: ChannelB, step: int, suspect: Sequence[bool], answers_again: Sequence[bool]
    ) -> None:
        before = b.rounds.proven
        b.rounds.observe(step, suspect=suspect, answers_again=answers_again)
        lost_servers = [index for index in before if index not in b.rounds.proven]
        if not lost_servers:
            return
        lost = [b.base_urls[index] for index in lost_servers]
        b.sync.distrust(lost_servers)
        # Only withdrawn, never re-proven here: this rank may meanwhile suspect another server.
        b.client.withdraw(lost)
        b.probe.watch([b.base_urls[index] for index in b.rounds.suspects])
        if not b.rounds.proven:
            b.fence.close()
        self._events.record_warning(f"suspect until a sync round proves it again: {', '.join(lost)}")

    def _reserve(self, num_packs: int) -> Reservation[Pack] | None:
        assert self._b is not None
        return self._b.queue.reserve(
            num_packs, current_version=self._b.clock.current, min_tokens=self._b.min_ready_tokens
        )

    def _agree(self, reservation: Reservation[Pack] | None) -> GateOutcome:
        facts = RankFacts(not_reserved=reservation is None, stop_requested=self._stop_requested)
        num_servers = 0
        if self._b is not None:
            b, num_servers = self._b, len(self._b.base_urls)
            answering, suspects, lost = b.probe.answering(), b.client.suspects, b.probe.lost()
            facts = replace(
                facts,
                pipeline_failed=b.pipeline.failure is not None,
                truncation_guard=b.guard.paused,
                evaluation_wanted=b.evaluation is not None and b.evaluation.wanted,
                round_ended=b.sync.has_ended,
                pace=b.pipeline.production_pace,
                # A server that a round or the probe lost is suspect as well, though no rollout client may know.
                servers_suspect=tuple(
                    url in suspects or index in lost or index not in b.rounds.proven
                    for index, url in enumerate(b.base_urls)
                ),
                servers_answer_again=tuple(url in answering for url in b.base_urls),
            )
        return decide(self._control.reduce_max(facts.encode()), num_servers=num_servers)

    def _spend(self, step: int, reservation: Reservation[Pack] | None, plan: StepPlan) -> tuple[Pack, ...]:
        if reservation is None or self._b is None:
            return ()
        if plan.channel is not Channel.B:
            reservation.release()
            return ()
        packs = tuple(reservation.take())
        for pack in packs:
            self._b.source.settle_trained(
                pack.keys, pack_id=pack.pack_id, step=step, version=self._b.clock.current
            )
        return packs

    def _publish(self, step: int, outcome: GateOutcome, *, wants_b: bool, reserved: bool) -> None:
        if self._b is None:
            return
        b = self._b
        if wants_b:
            self._missed_in_a_row = 0 if reserved else self._missed_in_a_row + 1
        if outcome.truncation_guard != self._paused:
            self._paused = outcome.truncation_guard
            self._events.record_warning(
                f"channel B {'pauses: too many rollouts are truncated' if self._paused else 'goes on'}"
                f" (this rank's share {b.guard.truncated_ratio:.2f}); raise rollout.decoding.max_new_tokens if it lasts"
            )
        round_pending = b.rounds.pending or b.rounds.in_transfer
        if b.evaluation is not None:
            b.evaluation.observe(
                step,
                outcome,
                version=b.clock.current,
                has_server=bool(b.rounds.proven),
                pending=round_pending,
            )
        b.pipeline.observe(
            StepView(
                step=step,
                started_s=time.monotonic(),
                step_seconds=self._step_seconds,
                last_commit_step=b.rounds.last_commit_step if b.rounds.last_commit_step is not None else step,
                round_pending=round_pending,
                slowest_pace=outcome.slowest_pace,
                missed_in_a_row=self._missed_in_a_row,
                max_prompts=self._max_prompts(b),
                paused=outcome.truncation_guard,
            )
        )

    def _max_prompts(self, b: ChannelB) -> int:
        num_proven = len(b.rounds.proven)
        if num_proven == 0:
            return 0
        return max_prompts_in_flight(b.max_inflight_per_server, num_proven, self._control.world_size)

    def _step_record(self, step: int, plan: StepPlan, packs: tuple[Pack, ...]) -> StepRecord:
        b = self._b
        version = b.clock.current if b else 0
        return StepRecord(
            step=step,
            plan=plan,
            version=version,
            version_lag=max((version - pack.version for pack in packs), default=None),
            queue_depth=b.queue.statistics().depth if b else 0,
            infer_in_flight=b.fence.in_flight if b else 0,
            round_pending=b.rounds.pending if b else False,
            round_in_transfer=b.rounds.in_transfer if b else False,
            packs=packs,
        )

    def _raise_failures(self, outcome: GateOutcome) -> None:
        if not outcome.pipeline_failed or self._b is None or self._b.continue_on_failure:
            return
        failure = self._b.pipeline.failure
        mine = f"rank {self._control.rank}: {type(failure).__name__}: {failure}" if failure else ""
        causes = "; ".join(cause for cause in self._control.gather(mine) if cause)
        raise PipelineFailed(
            f"channel B's pipeline must live for the whole run, it died ({causes}); mend the cause, or set "
            "stage2_ab.channel_b.on_pipeline_failure: continue_a"
        )

    def _watch_starvation(self, plan: StepPlan) -> None:
        if self._starvation is None or self._b is None:
            return
        verdict = self._starvation.observe(plan)
        if verdict is None:
            return
        if self._fail_when_starved:
            raise ChannelBStarved(str(verdict))
        self._events.record_warning(str(verdict))

    def _measure_step(self) -> None:
        now = time.monotonic()
        if self._last_begin_s is not None:
            seconds = now - self._last_begin_s
            before = self._step_seconds
            self._step_seconds = seconds if before is None else before + _SMOOTHING * (seconds - before)
        self._last_begin_s = now
