"""Runs channel B's stages on one background thread per rank: sample → rollout → target → segment → pack → queue.

The only file that knows the order of the stages. A turn takes in what servers have ended, gives them more, and only
then prepares and packs, so that they work meanwhile. It issues no collective; what it may do follows from the
``StepView`` that the learner publishes, and what went wrong is an attribute that the learner reads. Every sample drawn
ends trained, quarantined, or back in the source.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swift_stage2.channel_b.attempts import AttemptEnds, Attempts, AttemptState
from swift_stage2.channel_b.groups import Groups
from swift_stage2.channel_b.packing import decide_pack
from swift_stage2.channel_b.partial_rollouts import PartialRollouts, newest_version
from swift_stage2.channel_b.preprocessing import Judged, Prepared, Preprocessor, Refusal
from swift_stage2.channel_b.production_controller import ProductionController
from swift_stage2.channel_b.ready_queue import DropReason, ReadyQueue
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.rollout_client.trust import servers_at_fault
from swift_stage2.channel_b.sample_source import SampleSource
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.errors import QueueClosed, SampleError
from swift_stage2.records import BatchOutcome, Pack, QuarantineReason, ReturnReason, Rollout, Sample, Segment
from swift_stage2.runtime.watches import Standing
from swift_stage2.scheduling.horizon import Pacer, ProductionPace, StepView
from swift_stage2.scheduling.version_clock import VersionClock, is_fresh
from swift_stage2.scheduling.watches import TruncationGuard
from swift_stage2.telemetry.recorders import PipelineRecorder
from swift_stage2.telemetry.timing import PipelineActivity

logger = logging.getLogger(__name__)

_IDLE_SLICE_S = 0.2
_Work = Callable[[Sequence[Rollout]], Iterator[Prepared | Judged | Refusal]]
_RETURNS = {DropReason.STALE: ReturnReason.STALE, DropReason.OLDEST: ReturnReason.OVERFLOW}
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
    packing_length: int
    packing_min_fill_ratio: float
    redraw_dropped: bool
    max_attempts: int
    max_resumes: int | None = None
    """Times that a rollout is resumed; None: one that was aborted begins anew."""
    make_groups: Callable[[AttemptEnds], Groups] | None = None
    """Has rollouts of one row wait for each other; None: each is trained by itself."""
    ask_evaluation: Callable[[int], int] | None = None
    """Asks for at most so many prompts of an evaluation; how many that are."""
    take_evaluated: Callable[[BatchOutcome], None] | None = None
    """Takes what became of them."""

    def __post_init__(self) -> None:
        self._segments: list[Segment] = []
        self._held: list[Rollout] = []  # of weights that the learner has not heard proven yet
        self._misread: set[int] = set()  # rows, by a server that agreed on no other
        self._ends = AttemptEnds(
            self.source, self.events, redraw_dropped=self.redraw_dropped, max_attempts=self.max_attempts
        )
        self._partial = PartialRollouts(
            self.attempts,
            self._ends,
            self.client.confirms,
            self.clock,
            max_resumes=self.max_resumes,
            version_window=self.pacer.version_window,
        )
        self._groups = None if self.make_groups is None else self.make_groups(self._ends)
        self._drop = self._ends.dropped if self._groups is None else self._groups.drop
        self._view: StepView | None = None
        self._production = ProductionController(
            self.pacer, self.queue, self.clock, self.attempts, self.packing_length
        )
        self._used_up_for: StepView | None = None  # it waits for no more groups
        self._num_evaluating = 0  # asked for an evaluation, and not come back
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

    @property
    def production_pace(self) -> ProductionPace | None:
        """How long this rank's productions take, in steps; None before the first."""
        return self._production.pace

    def on_drop(self, pack: Pack, reason: DropReason) -> None:
        """Returns the samples of a pack that the queue dropped for a new rollout."""
        self.events.dropped(pack, reason)
        self._drop(pack.keys, _RETURNS[reason])

    def _run(self) -> None:
        try:
            with suppress(QueueClosed):  # the owner is shutting down
                while not self._stop.is_set():
                    self._rest()
                    self._turn(_IDLE_SLICE_S)
            self._partial.give_back(self.client.next_finished)
        except BaseException as error:  # top of the thread: the learner turns it into a decision of all ranks
            if self._stop.is_set():
                return  # what it used is being closed
            self.failure = error
            self.preprocessor.interrupt()  # nobody asks it again, and the run may go on without
            logger.exception("channel B's pipeline failed")
        finally:
            if self.failure is None:
                held, self._held = self._held, []
                held += self._groups.take_all() if self._groups is not None else ()
                self.source.give_back([rollout.sample.key for rollout in held], ReturnReason.STOPPED)
            self.events.enter(PipelineActivity.IDLE)
            self.standing = None
            self._production.end()

    def _rest(self) -> None:
        """It waits from now on, for servers or for a step."""
        if num_asked := self._partial.num_asked:
            self.events.enter(PipelineActivity.TICKET)
            waits = f"channel B's pipeline asks servers for {num_asked} rollouts"
            if self.standing is None or self.standing.what != waits:
                self.standing = Standing(waits)
        elif self._num_evaluating:
            self.events.enter(PipelineActivity.EVALUATING)
        else:
            self.events.enter(PipelineActivity.IDLE)
            self.standing = None

    def _turn(self, timeout_s: float) -> None:
        """Waits for something to end, or to be woken; then goes on with all that has ended.

        Refill comes before preparation. If nothing has come of what ended, nothing is asked in this turn, so that a
        lost server is not asked without a pause.
        """
        arrived: list[Rollout] = []
        evaluated: list[BatchOutcome] = []
        was_fruitful: list[bool] = []
        while (outcome := self.client.next_finished(timeout_s)) is not None:
            timeout_s = 0.0
            if outcome.terms is not None:
                evaluated.append(outcome)
            else:
                outcome = self._take_in(outcome)
                arrived += outcome.rollouts
            has_tokens = any(part.token_ids for part in outcome.partial)
            was_fruitful.append(bool(outcome.rollouts or outcome.quarantined or has_tokens))
        began = time.monotonic()
        heard = self._heard_proven(arrived)
        self._used_up_for = None
        if any(was_fruitful) or not was_fruitful:
            self._ask(heard)
        self._prepare(heard)
        self._prepare_groups(may_come=self.client.is_open and not self._held)
        self._pack_what_is_ready()
        for _, seconds in sorted({(rollout.server, rollout.seconds) for rollout in heard}):
            self._production.measured(self._view, seconds + time.monotonic() - began)
        for outcome in evaluated:
            self._go_on_to(PipelineActivity.EVALUATING, "judges an evaluation's answers")
            self._num_evaluating -= len(outcome.samples)
            assert self.take_evaluated is not None
            self.take_evaluated(outcome)
        if not (self._partial.num_asked or self._held):
            view = self._view
            self._production.tell(view, can_ask=bool(self.client.proven) and self._used_up_for is not view)

    def _take_in(self, outcome: BatchOutcome) -> BatchOutcome:
        """A share has ended: its attempts are over, or partial, and what was not answered goes back."""
        outcome = self._partial.take_in(outcome)
        self.events.batch(outcome)
        self._ends.take_back(outcome, is_stopped=self._stop.is_set())
        for sample, message in outcome.quarantined:
            self._ends.quarantine(sample.key, QuarantineReason.ROLLOUT, message)
        return outcome

    def _ask(self, heard: Sequence[Rollout]) -> None:
        """Takes the places that are free: what is resumed first, then what is new, and an evaluation has the rest."""
        view = self._view
        if view is None or view.max_prompts == 0:
            return
        if resumed := self._partial.to_resume(self.client.free_places):
            self._submit(resumed, are_new=False)
        here = [*self._held, *heard]
        waiting = self._groups.rollouts if self._groups is not None else ()
        versions = [rollout.version for rollout in (*here, *waiting)]
        num_wanted = self._production.num_samples(view, versions, self._segments)
        if self._groups is not None and view.num_demanded != 0:
            coming = {*self.attempts.open(), *(rollout.sample.key for rollout in here)}
            num_wanted = max(num_wanted, self._groups.num_to_ask(coming))
        if num_samples := min(self.client.free_places, num_wanted):
            self._ask_for(num_samples)
        elif self._production.should_stop_waiting(view):
            self._used_up_for = view
        if self.ask_evaluation is not None and (free := self.client.free_places):
            self.events.enter(PipelineActivity.EVALUATING)
            self._num_evaluating += self.ask_evaluation(free)

    def _ask_for(self, num_samples: int) -> None:
        self._go_on_to(PipelineActivity.READING, "reads rows and images")
        samples = []
        keys = self.source.draw(num_samples)
        most = min(len(keys) + _MOST_MISREAD, MAX_REQUESTS_PER_POST)
        while len(keys) < most and self._misread.issuperset(key.index for key in keys):
            keys += self.source.draw(1)  # they alone would make their server suspect again
        for key in keys:
            try:
                samples.append(self.source.read(key))
            except SampleError as error:
                self._ends.quarantine(key, QuarantineReason.SAMPLE, str(error))
        self.attempts.begin([sample.key for sample in samples])
        self._submit(samples, are_new=True)

    def _submit(self, drawn: Sequence[Sample], *, are_new: bool) -> None:
        samples, requests = [], []
        for sample in drawn:
            try:
                requests.append(self._partial.request(sample, self.make_request(sample)))
                samples.append(sample)
            except SampleError as error:
                self.attempts.close([sample.key], AttemptState.ENDED)
                self._ends.quarantine(sample.key, QuarantineReason.SAMPLE, str(error))
        if not samples:
            return
        if are_new:
            self._production.asked()
        self.events.enter(PipelineActivity.TICKET)
        self.client.submit(samples, requests)

    def _heard_proven(self, arrived: Sequence[Rollout] = ()) -> list[Rollout]:
        """Those to go on with, held ones first; the others wait, or return if no round is going to prove them."""
        looked_at, self._held = [*self._held, *arrived], []
        heard, unconfirmed = [], []
        for rollout in looked_at:
            confirmed = self.client.confirms(rollout)
            if confirmed is False:
                unconfirmed.append(rollout.sample.key)
            elif confirmed and newest_version(rollout) <= self.clock.current:
                heard.append(rollout)
            else:
                self._held.append(rollout)
        self._ends.unconfirmed(unconfirmed)
        return heard

    def _prepare(self, rollouts: Sequence[Rollout]) -> None:
        """Matches them; encodes them at once, or when the others of their group are here."""
        if not rollouts:
            return
        work: _Work = self.preprocessor.prepare
        if self._groups is not None:
            work = partial(self.preprocessor.compare, with_target=self._groups.with_target)
        found = self._preprocessed(rollouts, work)
        pairs = list(zip(rollouts, found, strict=True))
        agreed = {rollout.server for rollout, each in pairs if isinstance(each, Prepared | Judged)}
        at_fault = servers_at_fault(rollouts, found, self.client.note_agreement(agreed))
        self._misread -= {rollout.sample.key.index for rollout in rollouts}
        self._misread |= {rollout.sample.key.index for rollout in rollouts if rollout.server in at_fault}
        for server, reason in sorted(at_fault.items()):
            self.client.distrust(server, reason)
        for rollout, prepared in pairs:
            if rollout.server in at_fault:  # so that the sample returns as if it had not answered
                if isinstance(prepared, Prepared):
                    self.preprocessor.forget([prepared.segment])
                self.source.give_back([rollout.sample.key], ReturnReason.FAILED)
                continue
            self.guard.observe(rollout.truncated)
            if not isinstance(prepared, Prepared | Judged):
                self._ends.refused(rollout, prepared)
                continue
            self.events.matched(rollout, prepared.target, prepared.space)
            if isinstance(prepared, Prepared):
                self._keep(prepared)
            elif self._groups is not None:
                self._groups.add(rollout, prepared)

    def _prepare_groups(self, *, may_come: bool) -> None:
        """Encodes what is trained of the groups that wait for nothing more."""
        for group in self._groups.take(may_come=may_come) if self._groups else ():
            self._production.compared(self._view, yields_nothing=not group.trained, is_rest=group.is_rest)
            if not group.trained:
                continue
            self.events.compared(group.trained, group.reward_std)
            found = self._preprocessed(group.trained, self.preprocessor.prepare)
            for rollout, prepared in zip(group.trained, found, strict=True):
                if isinstance(prepared, Prepared):
                    self._keep(prepared)
                else:
                    self._ends.refused(rollout, prepared)

    def _preprocessed(self, rollouts: Sequence[Rollout], work: _Work) -> list[Any]:
        self._go_on_to(PipelineActivity.PREPARING, f"matches and encodes {len(rollouts)} rollouts")
        try:
            return list(work(rollouts))
        except BaseException:
            self._held += rollouts  # a stop interrupts it: their samples return when the thread ends
            raise

    def _keep(self, prepared: Prepared) -> None:
        self._segments.append(prepared.segment)
        self.events.segment(prepared.segment, prepared.seconds)

    def _pack_what_is_ready(self) -> None:
        while not self._stop.is_set():
            self._drop_stale_segments()
            if not self._segments:
                return
            lengths = [segment.num_tokens for segment in self._segments]
            view, num_out = self._view, self._partial.num_asked
            # More of them than fit, or nothing that could still come: to wait fills no pack better.
            is_stuck = num_out == 0 and (sum(lengths) > self.packing_length or self._used_up_for is view)
            num_here = len(lengths) + (len(self._groups.rollouts) if self._groups is not None else 0)
            starves = self._production.is_starving(view, num_here, num_out, is_stuck=is_stuck)
            chosen = decide_pack(lengths, self.packing_length, self.packing_min_fill_ratio, starves)
            segments = [self._segments[index] for index in chosen or ()]
            if chosen is None or not self._production.has_room(view, max(each.version for each in segments)):
                return
            self._go_on_to(PipelineActivity.PACKING, "packs")
            started = time.monotonic()
            pack = self.preprocessor.pack(uuid.uuid4().hex, segments)
            self._segments = [s for index, s in enumerate(self._segments) if index not in set(chosen)]
            self._production.packed(len(chosen))
            # Told first: once offered, the learner may train it at any moment.
            self.events.pack(pack, time.monotonic() - started)
            self.queue.offer(pack, current_version=self.clock.current)

    def _drop_stale_segments(self) -> None:
        current = self.clock.current  # read once: nothing may fall between two versions
        is_still = partial(is_fresh, current=current, window=self.pacer.version_window)
        stale = [segment for segment in self._segments if not is_still(segment.version)]
        if not stale:
            return
        self._segments = [segment for segment in self._segments if is_still(segment.version)]
        self.preprocessor.forget(stale)
        self.events.count("segments_dropped_stale", len(stale))
        self._drop([segment.key for segment in stale], ReturnReason.STALE)

    def _go_on_to(self, activity: PipelineActivity, what: str) -> None:
        self.events.enter(activity)
        self.standing = Standing(f"channel B's pipeline {what}")
