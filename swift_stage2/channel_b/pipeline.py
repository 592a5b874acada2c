"""Runs channel B's stages on one background thread per rank: sample → rollout → target → segment → pack → queue.

The only file that knows the order of the stages. It issues no collective; what it may do follows from the
``StepView`` that the learner publishes, and what went wrong is an attribute that the learner reads. Every
sample drawn ends trained, quarantined, or back in the source.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from swift_stage2.channel_b.image_files import num_pixels
from swift_stage2.channel_b.packing import decide_pack
from swift_stage2.channel_b.preprocessing import Prepared, Preprocessor, Refusal
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.rollout_client.trust import (
    MANY_GIVEN_UP,
    PERMUTED,
    many_mismatches,
    misreading_servers,
    permuting_servers,
)
from swift_stage2.channel_b.sample_source import ReturnReason, SampleSource
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import FenceShutDown, PromptMismatch, QueueClosed, SampleError
from swift_stage2.process.watches import Standing
from swift_stage2.records import (
    BatchOutcome,
    Pack,
    QuarantineReason,
    Rollout,
    Sample,
    SampleKey,
    Segment,
)
from swift_stage2.scheduling.outlook import PacingState, ProductionMeter, ProductionPace
from swift_stage2.scheduling.pacing import Pacer
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.servers.protocol import protect_from_abort
from swift_stage2.telemetry.activity import PipelineActivity
from swift_stage2.telemetry.recorders import PipelineRecorder

logger = logging.getLogger(__name__)

_IDLE_SLICE_S = 0.2
_SMOOTHING = 0.3  # weight of the newest pack in the moving average of segments per pack
_RETURNS = {DropReason.STALE: ReturnReason.STALE, DropReason.OLDEST: ReturnReason.OVERFLOW}
_WORDS = {
    ReturnReason.STALE: "went stale",
    ReturnReason.OVERFLOW: "was pushed out of a full queue",
    ReturnReason.TIMED_OUT: "did not end in time",
}


# Asked once more with one that was not, so that a server which misreads all is told by few.
_MOST_MISREAD = 64


@dataclass(frozen=True, slots=True)
class StepView:
    """The learner's word to the pipeline at the start of every step. Times are ``time.monotonic`` seconds."""

    step: int
    started_s: float
    step_seconds: float | None
    last_commit_step: int
    round_pending: bool
    slowest_pace: ProductionPace
    missed_in_a_row: int
    max_prompts: int
    paused: bool


@dataclass(kw_only=True, eq=False, repr=False)
class Pipeline:
    """One rank's channel-B producer. ``start`` and ``stop`` bound its thread's life."""

    source: SampleSource
    client: RolloutClient
    make_request: Callable[[Sample], dict[str, Any]]
    preprocessor: Preprocessor
    queue: ReadyQueue[Pack]
    clock: VersionClock
    pacer: Pacer
    guard: TruncationGuard
    events: PipelineRecorder
    packing_length: int
    packing_min_fill_ratio: float
    redraw_dropped: bool
    max_attempts: int
    version_window: int
    ask_evaluation: Callable[[int], bool] | None = None
    """Asks for at most so many prompts of an evaluation; False when nothing came of it."""

    def __post_init__(self) -> None:
        self._segments: list[Segment] = []
        self._aborted: set[SampleKey] = set()  # they are asked again first, and must then be let finish
        self._misread: set[SampleKey] = set()  # by a server that agreed on no other sample
        self._num_given_up: Counter[str] = Counter()  # by server, because it was asked another prompt
        self._view: StepView | None = None
        self._last_version_asked = -1
        self._meter = ProductionMeter()
        self._segments_per_pack = 1.0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="channel-b", daemon=True)
        self.failure: BaseException | None = None
        self.standing: Standing | None = None
        """The thread's work; None while there is nothing to do."""

    def start(self) -> None:
        """Starts the thread; it idles until the first ``observe``."""
        self._thread.start()

    def observe(self, view: StepView) -> None:
        """Publishes a new step to the thread; called by the learner, never blocks."""
        self._view = view
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end and waits for it; True iff it ended."""
        self._stop.set()
        self._wake.set()
        self.preprocessor.interrupt()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            self.preprocessor.close()
        return ended

    @property
    def production_pace(self) -> ProductionPace | None:
        """How long this rank's productions take, in steps; None before the first."""
        return self._meter.pace

    def on_drop(self, pack: Pack, reason: DropReason) -> None:
        """Returns the samples of a pack that the queue dropped for a new rollout."""
        self.events.dropped(pack, reason)
        self._return_for_redraw(pack.keys, _RETURNS[reason])

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                worked = self._work_once()
                self.standing = None
                self.events.enter(PipelineActivity.IDLE)
                if not worked:
                    self._wake.wait(_IDLE_SLICE_S)
                    self._wake.clear()
        except (FenceShutDown, QueueClosed):
            return  # the owner is shutting down
        except BaseException as error:  # top of the thread: the learner turns it into a decision of all ranks
            if self._stop.is_set():
                return  # what it used is being closed
            self.failure = error
            self.preprocessor.interrupt()  # nobody asks it again, and the run may go on without
            logger.exception("channel B's pipeline failed")
        finally:
            self.events.enter(PipelineActivity.IDLE)

    def _work_once(self) -> bool:
        view = self._view
        if view is None or view.max_prompts == 0:
            return False
        if num_samples := self._num_samples_wanted(view):
            return self._produce(num_samples)
        if self.ask_evaluation is None:
            return False
        # Training comes first: an evaluation has what production leaves, one batch at a time.
        self._go_on_to(PipelineActivity.EVALUATING, "asks servers for an evaluation")
        return self.ask_evaluation(view.max_prompts)

    def _num_samples_wanted(self, view: StepView) -> int:
        if view.paused and self._last_version_asked == self.clock.current:
            return 0
        num_packs = self.pacer.decide(self._state(view)).num_packs
        if num_packs == 0:
            return 0
        wanted = math.ceil(num_packs * self._segments_per_pack) - len(self._segments)
        return max(1, min(wanted, view.max_prompts))

    def _state(self, view: StepView) -> PacingState:
        elapsed_s = time.monotonic() - view.started_s
        progress = min(0.999, elapsed_s / view.step_seconds) if view.step_seconds else 0.0
        return PacingState(
            step=view.step,
            progress=progress,
            current_version=self.clock.current,
            last_commit_step=view.last_commit_step,
            round_pending=view.round_pending,
            ready_versions=self.queue.peek_versions(),
            pace=self._meter.pace,
            slowest_pace=view.slowest_pace,
            packs_per_production=max(1, int(view.max_prompts / self._segments_per_pack)),
            missed_in_a_row=view.missed_in_a_row,
        )

    def _produce(self, num_samples: int) -> bool:
        """One production; False when nothing came of it, so that a lost server is not asked without a pause."""
        self._go_on_to(PipelineActivity.READING, "reads rows and images")
        samples, requests = [], []
        keys = self.source.draw(num_samples)
        most = min(len(keys) + _MOST_MISREAD, MAX_REQUESTS_PER_POST)
        while len(keys) < most and self._misread.issuperset(keys):
            keys += self.source.draw(1)  # they alone would make their server suspect again
        for key in keys:
            try:
                sample = self.source.read(key)
                requests.append(self._request(sample))
                samples.append(sample)
            except SampleError as error:
                self._quarantine(key, QuarantineReason.SAMPLE, str(error))
        if not samples:
            return False
        self.events.read(
            [sample.key for sample in samples],
            # 1 of a task whose truth has no length
            num_objects=[len(s.truth) if isinstance(s.truth, Sized) else 1 for s in samples],
            num_pixels=[num_pixels(request) for request in requests],
        )
        self._last_version_asked = self.clock.current
        self._go_on_to(PipelineActivity.TICKET, f"asks servers for {len(samples)} rollouts")
        started = time.monotonic()
        outcome = self.client.generate(samples, requests)
        self.events.batch(outcome, time.monotonic() - started)
        self._remember_aborted(outcome)
        self._take_back(outcome)
        for sample, message in outcome.quarantined:
            self._quarantine(sample.key, QuarantineReason.ROLLOUT, message)
        prepared_from = time.monotonic()
        self._prepare(outcome.rollouts)
        self._pack_what_is_ready()
        if outcome.rollouts:
            # Waiting for a ticket is no part of a production: the pacer knows about rounds by itself.
            slowest = max(rollout.seconds for rollout in outcome.rollouts)
            self._measure(slowest + time.monotonic() - prepared_from)
        return bool(outcome.rollouts or outcome.quarantined)

    def _remember_aborted(self, outcome: BatchOutcome) -> None:
        self._aborted |= {rollout.sample.key for rollout in outcome.aborted}
        self._aborted -= {rollout.sample.key for rollout in outcome.rollouts}
        self._aborted -= {sample.key for sample, _ in outcome.quarantined}

    def _take_back(self, outcome: BatchOutcome) -> None:
        too_slow = [sample.key for sample in outcome.timed_out]
        aborted = {rollout.sample.key for rollout in outcome.aborted}
        unanswered = ReturnReason.STOPPED if self._stop.is_set() else ReturnReason.FAILED
        reasons: dict[ReturnReason, list[SampleKey]] = {ReturnReason.ABORTED: [], unanswered: []}
        for sample in outcome.returned:
            if sample.key not in too_slow:
                reason = ReturnReason.ABORTED if sample.key in aborted else unanswered
                reasons[reason].append(sample.key)
        for reason, keys in reasons.items():
            self.source.give_back(keys, reason)
        # A sample that does not answer even when it is asked alone would otherwise lead every batch to come.
        self._count_attempt(too_slow, ReturnReason.TIMED_OUT)

    def _request(self, sample: Sample) -> dict[str, Any]:
        request = self.make_request(sample)
        return protect_from_abort(request) if sample.key in self._aborted else request

    def _prepare(self, rollouts: Sequence[Rollout]) -> None:
        if not rollouts:
            return
        self._go_on_to(PipelineActivity.PREPARING, f"matches and encodes {len(rollouts)} rollouts")
        found = list(self.preprocessor.prepare(rollouts))
        pairs = list(zip(rollouts, found, strict=True))
        agreed = {rollout.server for rollout, each in pairs if isinstance(each, Prepared)}
        at_fault = misreading_servers(rollouts, found, self.client.note_agreement(agreed))
        at_fault |= dict.fromkeys(permuting_servers(rollouts, found), PERMUTED)
        self._misread -= {rollout.sample.key for rollout in rollouts}
        self._misread |= {rollout.sample.key for rollout in rollouts if rollout.server in at_fault}
        for server, reason in sorted(at_fault.items()):
            self.client.distrust(server, reason)
        for rollout, prepared in pairs:
            if rollout.server in at_fault:
                self._give_up_answer(rollout, prepared)
                continue
            self.guard.observe(rollout.truncated)
            if not isinstance(prepared, Prepared):
                reason = QuarantineReason.SAMPLE
                if isinstance(prepared, PromptMismatch):
                    reason = QuarantineReason.PROMPT
                    self._num_given_up[rollout.server] += 1
                    if self._num_given_up[rollout.server] == MANY_GIVEN_UP:
                        logger.warning(many_mismatches(rollout.server, prepared))
                self._quarantine(rollout.sample.key, reason, str(prepared))
                continue
            self._segments.append(prepared.segment)
            self.events.segment(prepared.segment, prepared.seconds)
            self.events.matched(rollout, prepared.target, prepared.space)

    def _give_up_answer(self, rollout: Rollout, prepared: Prepared | Refusal) -> None:
        """The server's fault, so that the sample returns as if it had not answered."""
        if isinstance(prepared, Prepared):
            self.preprocessor.forget([prepared.segment])
        self.source.give_back([rollout.sample.key], ReturnReason.FAILED)

    def _pack_what_is_ready(self) -> None:
        while not self._stop.is_set():
            self._go_on_to(PipelineActivity.PACKING, "packs")
            self._drop_stale_segments()
            if not self._segments:
                return
            view = self._view
            chosen = decide_pack(
                [segment.num_tokens for segment in self._segments],
                self.packing_length,
                self.packing_min_fill_ratio,
                view is not None and self.pacer.is_starving(self._state(view)),
            )
            if chosen is None:
                return
            started = time.monotonic()
            segments = [self._segments[index] for index in chosen]
            pack = self.preprocessor.pack(uuid.uuid4().hex, segments)
            self._segments = [s for index, s in enumerate(self._segments) if index not in set(chosen)]
            self._segments_per_pack += _SMOOTHING * (len(chosen) - self._segments_per_pack)
            # Told first: once offered, the learner may train it at any moment.
            self.events.pack(pack, time.monotonic() - started)
            self.queue.offer(pack, current_version=self.clock.current)

    def _drop_stale_segments(self) -> None:
        current = self.clock.current  # read once: nothing may fall between two versions
        fresh: list[Segment] = []
        stale: list[Segment] = []
        for segment in self._segments:
            is_still = is_fresh(segment.version, current=current, window=self.version_window)
            (fresh if is_still else stale).append(segment)
        if not stale:
            return
        self._segments = fresh
        self.preprocessor.forget(stale)
        for segment in stale:
            self.events.stale_segment(segment)
        self._return_for_redraw([segment.key for segment in stale], ReturnReason.STALE)

    def _return_for_redraw(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None:
        """Gives samples whose rollout was dropped untrained back, or gives them up."""
        if self.redraw_dropped:
            self._count_attempt(keys, reason)
            return
        for key in keys:
            message = f"its rollout {_WORDS[reason]}; redraw_dropped is false"
            self._quarantine(key, QuarantineReason.TOO_SLOW, message)

    def _count_attempt(self, keys: Sequence[SampleKey], reason: ReturnReason) -> None:
        """Samples whose rollout was lost are asked again, up to ``max_attempts`` rollouts."""
        again: list[SampleKey] = []
        for key in keys:
            if key.attempt + 1 < self.max_attempts:
                again.append(key)
                continue
            message = f"max_attempts={self.max_attempts} rollouts were lost, the last one {_WORDS[reason]}"
            self._quarantine(key, QuarantineReason.TOO_SLOW, message)
        self.source.give_back(again, reason)

    def _go_on_to(self, activity: PipelineActivity, what: str) -> None:
        self.events.enter(activity)
        self.standing = Standing(f"channel B's pipeline {what}")

    def _quarantine(self, key: SampleKey, reason: str, message: str) -> None:
        self.source.settle_quarantined(key, reason, message)
        self.events.quarantined(key, reason, message, self.source.origin_of(key))

    def _measure(self, seconds: float) -> None:
        view = self._view
        if view is not None and view.step_seconds:
            self._meter.observe(seconds / view.step_seconds)
