"""Runs channel B's stages on one background thread per rank: sample → rollout → target → segment → pack → queue.

The only file that knows the order of the stages. A turn takes in what servers have ended, gives them more, and only
then prepares and packs, so that they work meanwhile. It issues no collective; what it may do follows from the
``StepView`` that the learner publishes, and what went wrong is an attribute that the learner reads. Every sample drawn
ends trained, quarantined, unused, or back in the source.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swift_stage2.channel_b.attempts import AttemptOutcomes, Attempts
from swift_stage2.channel_b.groups import Groups
from swift_stage2.channel_b.packing import decide_pack
from swift_stage2.channel_b.preprocessing import EncodedRollout, Preprocessor, Refusal, ScoredRollout
from swift_stage2.channel_b.production_controller import ProductionController
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue
from swift_stage2.channel_b.rollouts import RolloutClient
from swift_stage2.channel_b.rollouts.server_state import servers_at_fault
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.config import PackingConfig
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import QueueClosed, SampleError
from swift_stage2.records import BatchOutcome, Pack, QuarantineReason, ReturnReason, Rollout, Sample, Segment
from swift_stage2.runtime.background import CurrentActivity
from swift_stage2.scheduling.horizon import Pacer, StepView
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.telemetry.recorders import PipelineRecorder
from swift_stage2.telemetry.timing import PipelineActivity

logger = logging.getLogger(__name__)

_IDLE_SLICE_S = 0.2
_END_S = 10.0  # places end within their calls' cut
_Work = Callable[[Sequence[Rollout]], Sequence[EncodedRollout | ScoredRollout | Refusal]]
_MOST_MISREAD = 64  # asked once more with one that was not, so that few tell a server which misreads all


@dataclass(kw_only=True, eq=False, repr=False)
class Pipeline:
    """One rank's channel-B producer. ``start`` and ``stop`` bound its thread's life."""

    source: SampleSource
    client: RolloutClient
    attempts: Attempts
    make_request: Callable[[Sample], dict[str, Any]]
    preprocessor: Preprocessor
    queue: ReadyQueue
    clock: VersionClock
    pacer: Pacer
    guard: TruncationGuard
    events: PipelineRecorder
    ends: AttemptOutcomes
    packing: PackingConfig
    groups: Groups | None = None
    """Holds rollouts of one row until their group is whole; None: each is trained by itself."""
    ask_evaluation: Callable[[int], int] | None = None
    """Asks for at most so many prompts of an evaluation; how many that are."""
    take_evaluated: Callable[[BatchOutcome], None] | None = None
    """Takes what became of them."""

    def __post_init__(self) -> None:
        self._segments: list[Segment] = []
        self._in_work: list[Rollout] = []  # of this turn, whatever it is at with them
        self._awaiting_confirmation: list[Rollout] = []  # that the learner has not heard their weights proven
        self._misread: set[int] = set()  # rows, by a server that agreed on no other
        self._drop = self.ends.dropped if self.groups is None else self.groups.drop
        self._view: StepView | None = None
        group_of = self.source.group_of if self.groups is not None else None
        self._production = ProductionController(
            self.pacer, self.queue, self.clock, self.attempts, self.packing.packing_length, group_of
        )
        self._used_up_for: StepView | None = None  # it waits for no more groups
        self._num_evaluating = 0  # asked for an evaluation, and not come back
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="channel-b", daemon=True)
        self.failure: BaseException | None = None
        self.current_activity: CurrentActivity | None = None
        """The thread's work; None while there is nothing to do."""

    def start(self) -> None:
        """Starts the thread; it idles until the first ``observe``."""
        self._thread.start()

    def observe(self, view: StepView) -> None:
        """Publishes a new step to the thread; called by the learner, never blocks."""
        self._view = view
        self.client.wake()

    def fill(self, view: StepView, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Has the packs made that ``view`` demands, and waits: until they are ready and no rollout is out any more.

        Sooner where nothing can be made: no server is proven, the guard pauses
        production, groups teach nothing, the thread has ended. So after ``timeout_s``, and once ``is_stopping``.
        """
        self.observe(view)
        self._production.wait(view, timeout_s, is_stopping)
        self.observe(replace(view, num_demanded=0))

    def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end and waits for it; True iff it ended."""
        self._stop.set()
        self.client.wake()
        self.preprocessor.interrupt()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            self.preprocessor.close()
        return ended

    def makes_stale(self, version: int) -> bool:
        """Whether a rollout or pack here is fresh now and too old once ``version`` is proven. On any thread."""
        versions = [each.version for each in self.attempts.open().values()]
        in_groups = self.groups.rollouts if self.groups is not None else ()
        here = (*self._in_work, *self._awaiting_confirmation, *in_groups, *self._segments)
        versions += [each.version for each in here]
        return version - self.pacer.version_window - 1 in (*versions, *self.queue.peek_versions())

    def most_steps_out(self, version: int) -> float:
        """Of the rollouts that ``version`` makes stale, as ``ProductionController`` has it. On any thread."""
        return self._production.most_steps_out(self._view, version)

    def on_drop(self, pack: Pack, reason: DropReason) -> None:
        """Returns the samples of a pack that the queue dropped for a new rollout."""
        self.events.dropped(pack, reason)
        is_stale = reason is DropReason.STALE
        self._drop(pack.keys, ReturnReason.STALE if is_stale else ReturnReason.OVERFLOW)

    def _run(self) -> None:
        try:
            with suppress(QueueClosed):  # the owner is shutting down
                while not self._stop.is_set():
                    self._rest()
                    self._turn(_IDLE_SLICE_S)
            self._give_back()
        except BaseException as error:  # top of the thread: the learner turns it into a decision of all ranks
            if self._stop.is_set():
                return  # what it used is being closed
            self.failure = error
            self.preprocessor.interrupt()  # nobody asks it again, and the run may go on without
            logger.exception("channel B's pipeline failed")
        finally:
            if self.failure is None:
                held, self._awaiting_confirmation = self._awaiting_confirmation, []
                held += self.groups.take_all() if self.groups is not None else ()
                self.source.give_back([rollout.sample.key for rollout in held], ReturnReason.STOPPED)
            self.events.enter(PipelineActivity.IDLE)
            self.current_activity = None
            self._production.end()

    def _rest(self) -> None:
        """It waits from now on, for servers or for a step."""
        if num_asked := len(self.attempts):
            self.events.enter(PipelineActivity.TICKET)
            waits = f"channel B's pipeline asks servers for {num_asked} rollouts"
            if self.current_activity is None or self.current_activity.what != waits:
                self.current_activity = CurrentActivity(waits)
        elif self._num_evaluating:
            self.events.enter(PipelineActivity.EVALUATING)
        else:
            self.events.enter(PipelineActivity.IDLE)
            self.current_activity = None

    def _turn(self, timeout_s: float) -> None:
        """Waits for something to end, or to be woken; then goes on with all that has ended.

        Refill comes before preparation. If nothing has come of what ended, nothing is asked in this turn, so that a
        lost server is not asked without a pause.
        """
        arrived, evaluated, was_fruitful = list[Rollout](), list[BatchOutcome](), list[bool]()
        while (outcome := self.client.next_finished(timeout_s)) is not None:
            timeout_s = 0.0
            if outcome.settings is not None:
                evaluated.append(outcome)
            else:
                self._handle_result(outcome)
                arrived += outcome.rollouts
            was_fruitful.append(bool(outcome.rollouts or outcome.quarantined))
        began = time.monotonic()
        confirmed = self._split_confirmed(arrived)
        self._used_up_for = None
        if any(was_fruitful) or not was_fruitful:
            self._ask(confirmed)
        self._match(confirmed)
        self._encode_groups()
        self._pack_what_is_ready()
        self._in_work = []
        if self.groups is None:
            for _, seconds in dict.fromkeys((rollout.server, rollout.seconds) for rollout in confirmed):
                self._production.measured(self._view, seconds + time.monotonic() - began)
        for outcome in evaluated:
            self._go_on_to(PipelineActivity.EVALUATING, "scores an evaluation's answers")
            self._num_evaluating -= len(outcome.samples)
            assert self.take_evaluated is not None
            self.take_evaluated(outcome)
        if not (self.attempts or self._awaiting_confirmation):
            view = self._view
            self._production.tell(view, can_ask=bool(self.client.proven) and self._used_up_for is not view)

    def _handle_result(self, outcome: BatchOutcome) -> None:
        """A share has ended: its attempts are over, and what was not answered goes back."""
        self._in_work += outcome.rollouts
        self.attempts.close([sample.key for sample in outcome.samples])
        self.events.batch(outcome)
        self.ends.take_back(outcome, is_stopped=self._stop.is_set())
        for sample, message in outcome.quarantined:
            self.ends.quarantine(sample.key, QuarantineReason.ROLLOUT, message)

    def _give_back(self) -> None:
        """The run ends: what servers have in hand comes back, for the client is stopped."""
        ends = time.monotonic() + _END_S
        while self.attempts and (left_s := ends - time.monotonic()) > 0:
            outcome = self.client.next_finished(left_s)
            if outcome is not None and outcome.settings is None:
                keys = [sample.key for sample in outcome.samples]
                self.attempts.close(keys)
                self.source.give_back(keys, ReturnReason.STOPPED)

    def _ask(self, confirmed: Sequence[Rollout]) -> None:
        """Takes the free places; an evaluation has the rest."""
        view = self._view
        if view is None or view.max_prompts == 0:
            return
        here = [*self._awaiting_confirmation, *confirmed]
        waiting = [*here, *(self.groups.rollouts if self.groups is not None else ())]
        num_wanted = self._production.num_samples(view, waiting, self._segments)
        if self.groups is not None and view.num_demanded != 0:
            coming = {*self.attempts.open(), *(rollout.sample.key for rollout in here)}
            num_wanted = max(num_wanted, self.groups.num_to_ask(coming))
        if num_samples := min(self.client.free_places, num_wanted):
            self._ask_for(num_samples)
        elif self._production.should_stop_waiting(view):
            self._used_up_for = view
        if self.ask_evaluation is not None and (free := self.client.free_places):
            self.events.enter(PipelineActivity.EVALUATING)
            self._num_evaluating += self.ask_evaluation(free)

    def _ask_for(self, num_samples: int) -> None:
        self._go_on_to(PipelineActivity.READING, "reads rows and images")
        samples, requests = [], []
        keys = self.source.draw(num_samples)
        most = min(len(keys) + _MOST_MISREAD, MAX_REQUESTS_PER_POST)
        while len(keys) < most and self._misread.issuperset(key.index for key in keys):
            keys += self.source.draw(1)  # they alone would make their server suspect again
        for key in keys:
            try:
                sample = self.source.read(key)
                requests.append(self.make_request(sample))
                samples.append(sample)
            except SampleError as error:
                self.ends.quarantine(key, QuarantineReason.SAMPLE, str(error))
        if not samples:
            return
        self.attempts.begin([sample.key for sample in samples])
        self._production.asked()
        self.events.enter(PipelineActivity.TICKET)
        self.client.submit(samples, requests)

    def _split_confirmed(self, arrived: Sequence[Rollout] = ()) -> list[Rollout]:
        """Those to go on with, longest here first; the others wait, or return if no round is going to prove them."""
        confirmed, unconfirmed, waiting = [], [], list[Rollout]()
        for rollout in (*self._awaiting_confirmation, *arrived):
            answer = self.client.confirms(rollout)
            if answer is False:
                unconfirmed.append(rollout.sample.key)
            elif answer and rollout.newest_version <= self.clock.current:
                confirmed.append(rollout)
            else:
                waiting.append(rollout)
        self._awaiting_confirmation = waiting  # at once: the learner's thread looks at it
        self.ends.unconfirmed(unconfirmed)
        return confirmed

    def _match(self, rollouts: Sequence[Rollout]) -> None:
        """Matches them; encodes them at once, or when the others of their group are here."""
        if not rollouts:
            return
        work: _Work = self.preprocessor.encode
        if self.groups is not None:
            work = partial(self.preprocessor.score, in_group=True, with_target=self.groups.with_target)
        matched = self._preprocessed(rollouts, work)
        pairs = list(zip(rollouts, matched, strict=True))
        agreed = {
            rollout.server for rollout, each in pairs if isinstance(each, EncodedRollout | ScoredRollout)
        }
        at_fault = servers_at_fault(rollouts, matched, self.client.note_agreement(agreed))
        self._misread -= {rollout.sample.key.index for rollout in rollouts}
        self._misread |= {rollout.sample.key.index for rollout in rollouts if rollout.server in at_fault}
        for server, reason in sorted(at_fault.items()):
            self.client.mark_suspect(server, reason)
        for rollout, found in pairs:
            if rollout.server in at_fault:  # so that the sample returns as if it had not answered
                if isinstance(found, EncodedRollout):
                    self.preprocessor.forget([found.segment])
                self.source.give_back([rollout.sample.key], ReturnReason.FAILED)
                continue
            self.guard.observe(rollout.truncated)
            if isinstance(found, EncodedRollout | ScoredRollout):
                self.events.matched(rollout, found.target, found.space)
            if isinstance(found, ScoredRollout):
                assert self.groups is not None
                self.groups.add(rollout, found)
            else:
                self._keep(rollout, found)

    def _encode_groups(self) -> None:
        """Encodes what is trained of the groups that wait for nothing more."""
        if self.groups is None or (view := self._view) is None:
            return
        self._in_work += self.groups.rollouts
        for group in self.groups.take(last_call=view.last_call):
            if group.seconds is not None:
                self._production.measured(view, group.seconds)
            self._production.compared(view, yields_nothing=not group.trained, is_rest=group.is_rest)
            if not group.trained:
                continue
            self.events.compared(group.trained, group.reward_std)
            found = self._preprocessed(group.trained, self.preprocessor.encode)
            for rollout, each in zip(group.trained, found, strict=True):
                self._keep(rollout, each)

    def _preprocessed(self, rollouts: Sequence[Rollout], work: _Work) -> list[Any]:
        self._go_on_to(PipelineActivity.PREPARING, f"matches and encodes {len(rollouts)} rollouts")
        try:
            return list(work(rollouts))
        except BaseException:
            self._awaiting_confirmation += rollouts  # a stop interrupts it: their samples return at the end
            raise

    def _keep(self, rollout: Rollout, found: EncodedRollout | Refusal) -> None:
        if isinstance(found, EncodedRollout):
            self._segments.append(found.segment)
            self.events.segment(found.segment, found.seconds)
        else:
            self.ends.refused(rollout, found)

    def _pack_what_is_ready(self) -> None:
        while not self._stop.is_set():
            self._drop_lost_segments()
            if not self._segments:
                return
            lengths = [segment.num_tokens for segment in self._segments]
            view = self._view
            # More of them than fit, or nothing that could still come: to wait fills no pack better.
            is_stuck = not self.attempts and (
                sum(lengths) > self.packing.packing_length or self._used_up_for is view
            )
            num_here = len(lengths) + (len(self.groups.rollouts) if self.groups is not None else 0)
            starves = self._production.is_starving(view, num_here, is_stuck=is_stuck)
            chosen = decide_pack(
                lengths, self.packing.packing_length, self.packing.packing_min_fill_ratio, starves
            )
            segments = [self._segments[index] for index in chosen or ()]
            if chosen is None or not self._production.has_room(view, max(each.version for each in segments)):
                return
            self._go_on_to(PipelineActivity.PACKING, "packs")
            started = time.monotonic()
            pack = self.preprocessor.pack(uuid.uuid4().hex, segments)
            if pack is None:
                continue
            self._segments = [s for index, s in enumerate(self._segments) if index not in set(chosen)]
            self._production.packed(len(chosen))
            # Told first: once offered, the learner may train it at any moment.
            self.events.pack(pack, time.monotonic() - started)
            self.queue.offer(pack, current_version=self.clock.current)

    def _drop_lost_segments(self) -> None:
        """Those that are stale, and those whose encodings went with the process that held them."""
        current = self.clock.current  # read once: nothing may fall between two versions
        is_still = partial(is_fresh, current=current, window=self.pacer.version_window)
        stale = [segment for segment in self._segments if not is_still(segment.version)]
        fresh = [segment for segment in self._segments if is_still(segment.version)]
        lost = [segment.key for segment in fresh if not self.preprocessor.holds(segment)]
        self._segments = [segment for segment in fresh if segment.key not in lost]
        if stale:
            self.preprocessor.forget(stale)
            self.events.count("segments_dropped_stale", len(stale))
            self._drop([segment.key for segment in stale], ReturnReason.STALE)
        self._drop(lost, ReturnReason.FAILED)

    def _go_on_to(self, activity: PipelineActivity, what: str) -> None:
        self.events.enter(activity)
        self.current_activity = CurrentActivity(f"channel B's pipeline {what}")
