"""Says how many samples one rank asks for now: what the pacer, or a step that waits, wants beyond what is out.

Sees versions, lengths, counts and times, never a sample. On the pipeline's thread; in mode inline the learner's waits
here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from swift_stage2.channel_b.attempts import Attempts
from swift_stage2.channel_b.ready_queue import ReadyQueue
from swift_stage2.records import Rollout, SampleKey, Segment
from swift_stage2.scheduling.horizon import (
    Pacer,
    PacerInputs,
    ProductionMeter,
    StepView,
    packs_of,
)
from swift_stage2.scheduling.version_clock import VersionClock

_STOP_SLICE_S = 0.2  # a signal's handler may take no lock, and so wakes nobody
_MOST_FRUITLESS = 32  # groups in a row of which nothing is trained, before a step waits for no other
_SMOOTHING = 0.3  # weight of the newest pack in the moving average of segments per pack


@dataclass(eq=False, repr=False)
class ProductionController:
    """One rank's demand for rollouts."""

    pacer: Pacer
    queue: ReadyQueue
    clock: VersionClock
    attempts: Attempts
    packing_length: int
    group_of: Callable[[SampleKey], Hashable] | None
    """Of rollouts that wait for each other; None: none does."""

    def __post_init__(self) -> None:
        self._meter = ProductionMeter()
        self._segments_per_pack = 1.0
        self._last_version_asked = -1
        self._compared_for: StepView | None = None
        self._num_fruitless = 0
        self._changed = threading.Condition()
        self._met: StepView | None = None  # the latest whose demand is met
        self._is_over = False

    def measured(self, view: StepView | None, seconds: float) -> None:
        """One took so long. Waits for a ticket or a proof are no part of it: the pacer knows rounds by itself."""
        if view is not None and view.step_seconds:
            self._meter.observe(seconds / view.step_seconds)

    def most_steps_out(self, view: StepView | None, version: int) -> float:
        """Steps for which the oldest rollout is out of those that are fresh before ``version`` and not with it."""
        edge = version - self.pacer.version_window - 1
        sent_s = [
            each.sent_s for each in self.attempts.open().values() if each.sent_s and each.version == edge
        ]
        if not sent_s or view is None or not view.step_seconds:
            return 0.0
        return (time.monotonic() - min(sent_s)) / view.step_seconds

    def packed(self, num_segments: int) -> None:
        self._segments_per_pack += _SMOOTHING * (num_segments - self._segments_per_pack)

    def compared(self, view: StepView | None, *, yields_nothing: bool, is_rest: bool) -> None:
        """A group was compared, or the rest of one that was before. ``yields_nothing``: none of it is trained."""
        if yields_nothing and is_rest:
            return  # its group has counted already, and late rollouts say nothing of other rows
        if yields_nothing and view is self._compared_for:
            self._num_fruitless += 1
        else:
            self._num_fruitless, self._compared_for = int(yields_nothing), view

    def should_stop_waiting(self, view: StepView) -> bool:
        """True once a step has waited for so many groups of which nothing is trained, and should wait for no more."""
        is_waiting = view.num_demanded is not None and view is self._compared_for
        return is_waiting and self._num_fruitless >= _MOST_FRUITLESS

    def asked(self) -> None:
        self._last_version_asked = self.clock.current

    def num_samples(self, view: StepView, here: Sequence[Rollout], segments: Sequence[Segment]) -> int:
        """Samples to ask for. ``here`` have come and are not prepared yet, or wait for others of their group.

        Segments that fit into one pack fill the next one, and are none by themselves. Of more, packs are in the making:
        they wait for room in the queue, or for a step that lacks them, and not for a rollout that fills one better.
        """
        attempts = self.attempts.open()
        if view.paused and (attempts or here or self._last_version_asked == self.clock.current):
            return 0
        state = self._state(view)
        are_packs = sum(segment.num_tokens for segment in segments) > self.packing_length
        of_segments = [segment.version for segment in segments] if are_packs else []
        rollouts = [(rollout.sample.key, rollout.version) for rollout in here]
        arrivals: dict[Hashable, float] = {}  # of the last of every group
        for key, attempt in attempts.items():
            rollouts.append((key, state.current_version if attempt.version is None else attempt.version))
            arrival = view.arrival(state, attempt.sent_s)
            arrivals[self._group(key)] = max(arrival, arrivals.get(self._group(key), arrival))
        coming = [(version, state.position) for version in of_segments]
        coming += [(version, arrivals.get(self._group(key), state.position)) for key, version in rollouts]
        in_making, over = packs_of(coming, self._segments_per_pack)
        # One that is late is not waited for: what is asked for now comes sooner.
        of_new = view.arrival(state, None)
        num_left = sum(arrival <= of_new for arrival in over)
        num_left += len(segments) - len(of_segments)
        num_packs = self._num_packs(view, replace(state, in_making=in_making))
        wanted = math.ceil(num_packs * self._segments_per_pack) - num_left
        if num_packs == 0 or (wanted <= 0 and any(arrival <= of_new for _, arrival in coming)):
            return 0
        return max(1, wanted)

    def has_room(self, view: StepView | None, youngest: int) -> bool:
        """True if the queue can take a pack whose youngest segment is of version ``youngest``.

        For that it must not drop a pack that is as young, or still fresh when the next step may train it.
        """
        if view is None:
            return True
        oldest_fresh = self.clock.current - self.pacer.version_window
        return self.queue.has_room(min(youngest, oldest_fresh))

    def is_starving(self, view: StepView | None, num_segments: int, *, is_stuck: bool) -> bool:
        """True if the pipeline should make a pack that is not full: the rollouts that are out fill none in time.

        For a step that waits, only if ``is_stuck``: then no rollout that may still come can fill the pack better.
        """
        if view is None:
            return False
        if view.num_demanded is not None:
            return is_stuck and self.queue.num_fresh(self.clock.current) < view.num_demanded
        state = self._state(view)
        of_new = view.arrival(state, None)
        out = self.attempts.open().values()
        num_soon = sum(view.arrival(state, each.sent_s) <= of_new for each in out)  # others are late
        fills_soon = num_soon > 0 and num_soon + num_segments >= self._segments_per_pack
        return not fills_soon and self.pacer.is_starving(state)

    def wait(self, view: StepView, timeout_s: float, is_stopping: Callable[[], bool]) -> None:
        """Until the demand of ``view`` is met, production is over, a stop is asked, or the time has passed."""
        ends = time.monotonic() + timeout_s
        with self._changed:
            while not (self._met is view or self._is_over or is_stopping()):
                if (left_s := ends - time.monotonic()) <= 0:
                    return
                self._changed.wait(min(left_s, _STOP_SLICE_S))

    def tell(self, view: StepView | None, *, can_ask: bool) -> None:
        """Nothing is out: lets a step that waits go on if it has what it wants, or if nothing more can be made."""
        if view is None or view.num_demanded is None:
            return
        num_ready = self.queue.num_fresh(self.clock.current)
        is_probed = view.paused and self._last_version_asked == self.clock.current
        if num_ready >= view.num_demanded or is_probed or not can_ask:
            with self._changed:
                self._met = view
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _group(self, key: SampleKey) -> Hashable:
        return key if self.group_of is None else self.group_of(key)

    def _num_packs(self, view: StepView, state: PacerInputs) -> int:
        if view.num_demanded is None:
            return self.pacer.decide(state)
        if self.should_stop_waiting(view):
            return 0
        num_lacking = view.num_demanded - self.queue.num_fresh(self.clock.current) - len(state.in_making)
        # One more, or a step would often wait for another turn of a few rollouts; what is left over fills the next.
        return num_lacking + 1 if num_lacking > 0 else 0

    def _state(self, view: StepView) -> PacerInputs:
        return replace(
            view.pacing,
            progress=view.progress,
            current_version=self.clock.current,
            ready_versions=self.queue.peek_versions(),
            typical_steps=self._meter.typical_steps,
            slow_steps=self._meter.slow_steps if self.group_of is not None else None,
        )
