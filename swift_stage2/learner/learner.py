"""Decides every optimizer step on the main thread: new weights if due, reserve, agree, then channel A or B packs.

All ranks call ``begin_step`` at the same step and reach the same decision, because every rank-local fact
travels in one vector and nothing else is consulted. Knows no ms-swift; called by the trainer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_stage2.channel_b.ready_queue import Reservation
from swift_stage2.collectives import ControlGroup
from swift_stage2.errors import ChannelBStarved, PipelineFailed, Stage2Error
from swift_stage2.evaluation import PinnedEvaluation
from swift_stage2.learner.parts import ChannelB
from swift_stage2.learner.phases import Phases
from swift_stage2.learner.versions import LearnerVersions
from swift_stage2.records import Pack
from swift_stage2.runtime.background import BackgroundFailures
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd
from swift_stage2.scheduling.feasibility_gate import GateOutcome, RankFacts, decide
from swift_stage2.scheduling.horizon import (
    PacerInputs,
    StepView,
    max_prompts_in_flight,
)
from swift_stage2.scheduling.step_plan import Channel, StepPlan
from swift_stage2.scheduling.version_clock import require_fresh
from swift_stage2.scheduling.watches import StarvationWatch
from swift_stage2.telemetry.event_log import unwritten
from swift_stage2.telemetry.events import Checkpoint, Step
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.weights.updates import UpdateNews

logger = logging.getLogger(__name__)

_SMOOTHING = 0.2  # weight of the newest step in the moving average of step seconds
_STOP_TIMEOUT_S = 30.0
_LONG_S = 30.0  # for what a pipeline waits for
_LOOK_S = 0.1  # between two agreements after training
_CLOCKS_APART_S = 1.0  # that ranks may be at the end of training


@dataclass(frozen=True, slots=True)
class StepDecision:
    """One step's plan and this rank's packs for it, and whether the run ends after it."""

    plan: StepPlan
    packs: tuple[Pack, ...]
    stop: bool


@dataclass(eq=False, repr=False, kw_only=True)
class Learner:
    """One rank's decisions. Without a ``ChannelB`` every step is channel A and only a stop is agreed."""

    b_ratio: float
    control: ControlGroup
    events: Telemetry
    starvation: StarvationWatch | None
    fail_when_starved: bool
    channel_b: ChannelB | None
    failures: BackgroundFailures = field(default_factory=BackgroundFailures)
    """Of threads that nobody waits for; every step tells the new ones."""

    def __post_init__(self) -> None:
        # Without a lock: a signal handler sets it, and a second signal may interrupt the first one's.
        self._stop_requested = False
        self._missed_in_a_row = 0
        self._paused = False
        self._has_trained = False
        self._versions = (
            LearnerVersions(self.channel_b, self.control, self.events, self._agree)
            if self.channel_b is not None
            else None
        )
        self._last_begin_s: float | None = None
        self._step_seconds: float | None = None

    def start(self) -> None:
        """Starts the background threads. Nothing is asked before a server has proven a version."""
        self.failures.watch()
        if self._versions is not None:
            self._versions.find_asleep()
        if self.channel_b is not None:
            if self.channel_b.updates is not None:
                self.channel_b.updates.start()
            self.channel_b.pipeline.start()

    def request_stop(self) -> None:
        """Asks all ranks to stop at the end of the next step they agree on; safe in a signal handler."""
        self._stop_requested = True

    def begin_step(self, step: int, num_packs: int) -> StepDecision:
        """Begins a due version, agrees with all ranks on this step's channel, and applies what else they agreed on.

        ``num_packs`` is the number of micro_steps of the window, the same on all ranks.

        Raises:
            WeightSyncError: the learner's weights cannot be exported.
            WeightSyncHang: another rank has ended because of a snapshot.
            StaleSample: a bug let one come so far.
            StorageFull: some rank's event log cannot be written; nothing of this step is trained.
            PipelineFailed: a pipeline died somewhere and the configuration asks to fail.
            ChannelBStarved: B starved and the configuration asks to fail.
        """
        self._measure_step()
        for failure in self.failures.take():
            self.events.record_warning(failure)
        if self._versions is not None:
            self._versions.begin_if_due(step)
            if (
                self.channel_b is not None
                and self.channel_b.phases is not None
                and not self._versions.is_asleep
            ):
                self._use_servers(step, self.channel_b, self.channel_b.phases)
        started = time.perf_counter()
        wants_b = self.channel_b is not None and wants_channel_b(step, self.b_ratio)
        reservation = self._reserve(step, num_packs) if wants_b else None
        outcome, news = self._agree(step, reservation)
        plan = outcome.plan(wants_b=wants_b)
        packs = self._spend(step, reservation, plan)
        told = self._told(step, plan, packs, time.perf_counter() - started)
        if self._versions is not None:  # after this step's packs were taken: none ages between the two
            self._versions.apply(step, outcome, news)
        if self.channel_b is not None and self.channel_b.phases is not None:
            self.channel_b.phases.schedule.observe(step, is_fed=not outcome.not_reserved)
        self._publish(step, outcome, wants_b=wants_b, reserved=reservation is not None)
        self.events.record_step(told)
        self._raise_failures(outcome)
        self._watch_starvation(plan)
        if outcome.stop_requested:
            self.events.record_warning(
                f"training ends after step {step + 1}, because a signal asks for it; --resume goes on from there"
            )
        return StepDecision(plan, packs, outcome.stop_requested)

    def end_step(self, step: int, losses: Sequence[str]) -> None:
        """``step`` has trained; the losses of its micro_steps as ``float.hex``, where the run records them."""
        self.events.record_losses(step, losses)

    def evaluate_final(self, step: int) -> None:
        """Training is over before ``step``: servers take the weights once more and answer the validation rows.

        On all ranks together, once; training does not go on. Nothing happens where there are no evaluations. A warning
        tells where no server is left, or the time is over.

        Raises:
            WeightSyncError, WeightSyncHang: as ``begin_step`` does.
        """
        b = self.channel_b
        if b is None or b.evaluation is None or not b.final_evaluation_s or self._has_trained:
            return
        self._has_trained = True
        b.evaluation.schedule.ask_for_final(step)
        b.schedule.is_asked_for = True
        self.control.gather("")  # rank 0 may still write what the others do not
        end = time.monotonic() + b.final_evaluation_s
        with self.events.activity("evaluating"):
            while not self._has_evaluated(b.evaluation, step, end):
                time.sleep(_LOOK_S)  # bounded: all ranks agree on the first one that is late
        if b.phases is not None and self._versions is not None and not self._versions.is_asleep:
            self._versions.end_phase(step, b.phases)
        latest = b.evaluation.ended[-1] if b.evaluation.ended else None
        why = latest.end if latest is not None and latest.due_step == step else "none began"
        if why is not EvaluationEnd.COMPLETE and not self._stop_requested:
            within = f" within {b.final_evaluation_s:g} s" if time.monotonic() >= end else ""
            assert self._versions is not None
            num_proven = sum(version > 0 for version in self._versions.asked)
            self.events.record_warning(
                f"the final weights must be evaluated by a proven server, got {why}{within} and "
                f"{num_proven} proven; swift-stage2 evaluate does it with the last checkpoint"
            )

    def checkpoint(self, *, step: int, save_id: str) -> dict[str, Any]:
        """This rank's state for a run resumed before ``step``, besides the trainer's own, as JSON."""
        if self.channel_b is None:
            self.events.log.write(Checkpoint(step=step, save_id=save_id))
            return {}
        source = self.channel_b.source.checkpoint(step=step, save_id=save_id)
        unfinished = (
            self.channel_b.evaluation.schedule.unfinished if self.channel_b.evaluation is not None else None
        )
        return {
            "version": self.channel_b.clock.current,
            "source": source,
            "unfinished_evaluation": unfinished,
            "answer_fingerprint": list(self.channel_b.answer_fingerprint),
        }

    def close(self) -> None:
        """Ends the threads in the one order that cannot abort the process: stop, HTTP, join, publisher."""
        self.failures.stop()
        b = self.channel_b
        if b is None:
            return
        b.pipeline.stop(0.0)  # first, so that what the others refuse it from now on is no failure
        b.client.request_stop()
        b.queue.close()
        b.client.close()
        if not b.pipeline.stop(_STOP_TIMEOUT_S):
            self.events.record_warning(f"the pipeline's thread did not end within {_STOP_TIMEOUT_S:.0f} s")
        if b.updates is not None:
            b.updates.close()
        b.snapshots.close()
        if b.evaluation is not None:
            b.evaluation.close()

    def _has_evaluated(self, evaluation: PinnedEvaluation, step: int, end: float) -> bool:
        """One agreement after training: the final weights and evaluation go on. True when nothing more can come."""
        assert self._versions is not None
        outcome, news = self._agree(step, stops=time.monotonic() >= end)
        # Else a rank has found the time to be over, a moment before this one.
        self._stop_requested |= outcome.stop_requested and time.monotonic() < end - _CLOCKS_APART_S
        self._versions.apply(step, outcome, news)
        if evaluation.schedule.running is None and not outcome.stop_requested:
            self._versions.begin_if_due(step)
        self._publish(step, outcome, wants_b=False, reserved=False)
        return (
            evaluation.schedule.unfinished is None
            or outcome.stop_requested
            or outcome.pipeline_failed
            or not (any(self._versions.asked) or self._versions.is_publishing)
        )

    def _use_servers(self, step: int, b: ChannelB, phases: Phases) -> None:
        """While the servers are awake: makes the packs of a whole phase, and runs the evaluation that is due."""
        assert self._versions is not None
        assert b.longest_fill_s is not None
        with self.events.activity("filling"):
            view = self._view(b, step, phases.num_demanded)
            b.pipeline.fill(view, b.longest_fill_s, lambda: self._stop_requested)
        with self.events.activity("evaluating"):
            while b.evaluation is not None and not self._has_evaluated(b.evaluation, step, math.inf):
                if b.evaluation.schedule.running is None:
                    break  # it may not begin at this step
                time.sleep(_LOOK_S)  # bounded: every question is asked so many times, each with a deadline
        self._versions.end_phase(step, phases)

    def _reserve(self, step: int, num_packs: int) -> Reservation | None:
        b = self.channel_b
        assert b is not None
        assert self._versions is not None
        if b.longest_fill_s is not None and b.phases is None and not self._versions.holds_production:
            b.pipeline.fill(self._view(b, step, num_packs), b.longest_fill_s, lambda: self._stop_requested)
        return b.queue.reserve(num_packs, current_version=b.clock.current, min_tokens=b.min_ready_tokens)

    def _agree(
        self, step: int, reservation: Reservation | None = None, *, stops: bool = False
    ) -> tuple[GateOutcome, UpdateNews | None]:
        """One agreement of all ranks, with what rank 0 tells beside it. If it raises, nothing reserved was trained."""
        facts = RankFacts(
            not_reserved=reservation is None,
            stop_requested=self._stop_requested or stops,
            log_failed=bool(self.events.log.failure),
        )
        num_servers = 0
        try:
            if self.channel_b is not None:
                facts = self.channel_b.with_facts(facts, step)
                num_servers = len(self.channel_b.base_urls)
                with self.channel_b.snapshots.explained():
                    vector = self.control.reduce_max(facts.encode())
            else:
                vector = self.control.reduce_max(facts.encode())
            outcome = decide(vector, num_servers=num_servers)
            if outcome.log_failed:
                raise unwritten(self._causes(self.events.log.failure))
            news = None
            if outcome.update_news and self._versions is not None:
                news = self._versions.tell_news()
        except Stage2Error:
            if reservation is not None:
                reservation.release()
            raise
        return outcome, news

    def _spend(self, step: int, reservation: Reservation | None, plan: StepPlan) -> tuple[Pack, ...]:
        if reservation is None or self.channel_b is None:
            return ()
        if plan.channel is not Channel.B:
            reservation.release()
            return ()
        packs = tuple(reservation.take())
        current, window = self.channel_b.clock.current, self.channel_b.queue.version_window
        for pack in packs:
            require_fresh(zip(pack.keys, pack.versions, strict=True), current=current, window=window)
            self.channel_b.source.settle_trained(pack.keys, pack_id=pack.pack_id, step=step, version=current)
        return packs

    def _publish(self, step: int, outcome: GateOutcome, *, wants_b: bool, reserved: bool) -> None:
        if self.channel_b is None or self._versions is None:
            return
        b = self.channel_b
        if wants_b:
            self._missed_in_a_row = 0 if reserved else self._missed_in_a_row + 1
        if outcome.truncation_guard != self._paused:
            self._paused = outcome.truncation_guard
            self.events.record_warning(
                f"channel B {'pauses: too many rollouts are truncated' if self._paused else 'goes on'}"
                f" (this rank's share {b.guard.truncated_ratio:.2f}); raise rollout.decoding.max_new_tokens if it "
                "lasts",
            )
        if b.evaluation is not None:
            b.evaluation.observe(
                step,
                outcome,
                version=b.clock.current,
                has_server=any(self._versions.asked),
                pending=self._versions.is_changing,
            )
            if b.phases is not None and not outcome.pipeline_failed:  # it needs servers that are awake
                b.schedule.is_asked_for |= b.evaluation.schedule.could_begin_after(step)
        num_demanded = 0 if self._has_trained or b.longest_fill_s is not None else None
        b.pipeline.observe(self._view(b, step, num_demanded))

    def _view(self, b: ChannelB, step: int, num_demanded: int | None) -> StepView:
        versions, world_size = self._versions, self.control.world_size
        assert versions is not None
        num_proven = sum(version > 0 for version in versions.asked)
        pacing = PacerInputs(
            step=step,
            current_version=b.clock.current,
            holds_production=versions.holds_production,
            missed_in_a_row=self._missed_in_a_row,
        )
        return StepView(
            pacing=pacing,
            started_s=time.monotonic(),
            step_seconds=self._step_seconds,
            max_prompts=max_prompts_in_flight(b.max_inflight_per_server, num_proven, world_size)
            if num_proven
            else 0,
            paused=self._paused,
            last_call=versions.last_call(step, max(b.schedule.sync_every_steps, math.ceil(1 / self.b_ratio))),
            num_demanded=num_demanded,
        )

    def _told(self, step: int, plan: StepPlan, packs: tuple[Pack, ...], plan_seconds: float) -> Step:
        b = self.channel_b
        return Step.planned(
            step,
            plan,
            packs,
            b.clock.current if b else 0,
            plan_seconds=plan_seconds,
            queue_depth=b.queue.depth if b else 0,
            infer_in_flight=b.client.in_flight if b else 0,
            version_pending=self._versions.is_pending if self._versions else False,
            version_in_transfer=self._versions.is_publishing if self._versions else False,
        )

    def _raise_failures(self, outcome: GateOutcome) -> None:
        if not outcome.pipeline_failed or self.channel_b is None or self.channel_b.continue_on_failure:
            return
        failure = self.channel_b.pipeline.failure
        causes = self._causes(f"{type(failure).__name__}: {failure}" if failure else "")
        raise PipelineFailed(
            f"channel B's pipeline must live for the whole run, it died ({causes}); mend the cause, or set "
            "stage2_ab.channel_b.on_pipeline_failure: continue_a"
        )

    def _causes(self, mine: str) -> str:
        """The causes of all ranks that have one."""
        told = enumerate(self.control.gather(mine))
        return "; ".join(f"rank {rank}: {cause}" for rank, cause in told if cause)

    def _watch_starvation(self, plan: StepPlan) -> None:
        if self.starvation is None or self.channel_b is None:
            return
        found = self.starvation.observe(plan)
        if found is None:
            return
        if found.is_past_grace and self.fail_when_starved:
            raise ChannelBStarved(found.cause)
        cause, stands = found.cause, self.channel_b.pipeline.current_activity
        # A server that hangs is no fault until its request's deadline: so say what has been waited for until now.
        if stands is not None and (seconds := time.monotonic() - stands.since_s) >= _LONG_S:
            cause += f"; {stands.what} for {seconds:.0f} s"
        self.events.record_warning(cause)

    def _measure_step(self) -> None:
        now = time.monotonic()
        if self._last_begin_s is not None:
            seconds = now - self._last_begin_s
            before = self._step_seconds
            self._step_seconds = seconds if before is None else before + _SMOOTHING * (seconds - before)
        self._last_begin_s = now
