"""The versions of one rank's learner: begins a due one, and moves clock and rollout client by what ranks agreed on.

A version is begun by all ranks at the same step, with one copy of the weights; rank 0's ``Updates`` brings it to the
servers while training goes on. What they have proven travels in every step's vector. Every decision comes from agreed
facts, so all ranks take the same at the same step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from swift_stage2.collectives import ControlGroup, run_on_all_ranks
from swift_stage2.learner.parts import ChannelB
from swift_stage2.learner.phases import Phases
from swift_stage2.scheduling.feasibility_gate import GateOutcome
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.weights.updates import UpdateNews

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # between two agreements while training waits


class LearnerVersions:
    def __init__(
        self,
        parts: ChannelB,
        control: ControlGroup,
        events: Telemetry,
        agree: Callable[[int], tuple[GateOutcome, UpdateNews | None]],
    ) -> None:
        """``agree`` makes one agreement of all ranks outside of a step."""
        self._b = parts
        self._control = control
        self._events = events
        self._agree = agree
        self._is_first = True
        self._has_warned = False
        self._is_publishing = False
        self._server_waits = True  # those that have answered before the start
        self._makes_stale = False
        self._closed: tuple[bool, ...] = (False,) * len(parts.base_urls)
        self._due_s: float | None = None  # moment at which the pending version fell due
        self._pending_seconds = 0.0  # of the version that began last
        self.is_asleep = parts.phases is not None
        """True while the servers that use the learner's devices sleep, and before the first phase."""
        self.asked: tuple[int, ...] = (0,) * len(parts.base_urls)
        """By server, the version that it is asked under; 0 if it is not asked."""

    @property
    def is_pending(self) -> bool:
        """Whether a version is due and has not begun."""
        return self._b.schedule.pending_step is not None

    @property
    def is_changing(self) -> bool:
        """Whether a version is due or on its way, or has to come before anything is asked."""
        return self.is_pending or self.is_publishing or self._b.schedule.is_asked_for or self.is_asleep

    @property
    def is_publishing(self) -> bool:
        """Whether weights are on their way to a server, or wait until it is drained."""
        return not self.is_asleep and (self._is_publishing or any(self._closed))

    @property
    def holds_production(self) -> bool:
        """Whether a rollout that is asked for now waits for new weights."""
        open_servers = [
            not closed for version, closed in zip(self.asked, self._closed, strict=True) if version
        ]
        return bool(open_servers) and not any(open_servers)

    @property
    def awaits_version(self) -> bool:
        """Whether a version is on its way that no server has proven: it may come at any step."""
        return self.is_publishing and self._b.schedule.begun > self._b.clock.current

    def last_call(self, step: int, num_steps: int) -> int | None:
        """The version that is on its way, or begins within ``num_steps`` whatever it makes stale."""
        if self.awaits_version:
            return self._b.schedule.begun
        return self._b.schedule.next_version if self._b.schedule.comes_within(num_steps, step) else None

    def begin_if_due(self, step: int) -> None:
        """Begins a version at the start of ``step`` if one is due and the snapshot is free.

        An evaluation holds it back. Training waits for the first one, and for each in mode inline.

        Raises:
            WeightSyncHang: another rank has ended because of it.
            WeightSyncError: the learner's weights cannot be exported.
        """
        b = self._b
        facts = {"any_proven": any(self.asked), "server_waits": self._server_waits}
        if not b.schedule.is_due(step, makes_stale=self._makes_stale, **facts):
            self._due_s = None
            return
        if self._due_s is None:
            self._due_s = time.monotonic()
        if b.evaluation is not None and b.evaluation.holds_round(step):
            return
        # One that is not proven yet would leave a gap, and a gap ages what is at hand.
        if self._is_publishing or self.awaits_version:
            if b.updates is not None:
                b.updates.hurry("after other weights were due")
            return
        self._warn_of_long_rollouts()
        self._pending_seconds, self._due_s = time.monotonic() - self._due_s, None
        version = b.schedule.begin(step)
        with self._events.activity("syncing"):
            canary_due = b.updates is not None and b.updates.canary_due
            taken = b.snapshots.take(version, step=step, canary_due=canary_due)
            if b.phases is not None:
                self._make_room(b.phases)
            if b.updates is not None and taken is not None:
                b.updates.begin(taken, step)
            for url, asked in zip(b.base_urls, self.asked, strict=True):
                if asked and not b.client.stages(url):  # one that is idle is drained by this step's agreement
                    b.client.update(url, asked, closed=True)
            self._is_publishing, self._server_waits = True, False
            if self._is_first or b.longest_fill_s is not None:
                self._is_first = False
                self._await_version(step)

    def _warn_of_long_rollouts(self) -> None:
        """Once, where a version has waited as long as it may, and one of this rank's rollouts is still out."""
        schedule = self._b.schedule
        if self._has_warned or self._server_waits or schedule.is_asked_for or not self._makes_stale:
            return
        if not (num_steps := math.ceil(self._b.pipeline.most_steps_out(schedule.next_version))):
            return
        self._has_warned = True
        self._events.record_warning(
            f"new weights wait for a rollout for at most {schedule.most_cadences} × sync_every_steps = "
            f"{schedule.most_steps} steps, and one that has been out for about {num_steps} steps is lost; write "
            f"sync_every_steps: {max(schedule.sync_every_steps, math.ceil(num_steps / schedule.most_cadences)) + 1} or "
            "more, or lower rollout.decoding.max_new_tokens"
        )

    def tell_news(self) -> UpdateNews:
        """Tells all ranks what rank 0 has heard; a collective.

        Raises:
            WeightSyncError: the learner's weights cannot be pushed; on every rank.
        """
        updates = self._b.updates
        told = updates.collect_update().to_json() if updates is not None else None
        with self._b.snapshots.explained():
            news = UpdateNews.from_json(self._control.broadcast(told))
        news.require_no_fault()
        return news

    def apply(self, step: int, outcome: GateOutcome, news: UpdateNews | None) -> None:
        """Moves clock, client and, on rank 0, updates by what all ranks agreed on at ``step``."""
        b = self._b
        if news is not None:
            self._take_news(step, news)
        if self.holds_production:
            b.schedule.hold(step)
        asked, closed = outcome.servers_asked, outcome.servers_closed
        drained = [
            server
            for server, (is_closed, busy) in enumerate(zip(closed, outcome.servers_busy, strict=True))
            if is_closed and not busy and not self.is_asleep
        ]
        told = news.outcome.failed if news is not None and news.outcome is not None else ()
        lost = [
            url
            for server, (url, before, now) in enumerate(zip(b.base_urls, self.asked, asked, strict=True))
            if before and not now and server not in told
        ]
        self.asked, self._closed = asked, closed
        # Rank 0 may begin a push to who is drained.
        self._is_publishing, self._server_waits = outcome.publishing or bool(drained), outcome.server_waits
        # With a window of 0 every version makes stale all that is in flight.
        self._makes_stale = outcome.makes_stale and b.queue.version_window > 0
        if (newest := max(asked, default=0)) > b.clock.current:
            b.clock.advance(newest)
        for url, version, is_closed in zip(b.base_urls, asked, closed, strict=True):
            b.client.update(url, version, closed=is_closed)
        if not self._is_publishing:
            # Long before it begins: rank 0 may begin it, and a server install it, while others still train.
            b.client.expect(b.schedule.next_version)
        if b.updates is not None:
            b.updates.apply_agreement(
                asked,
                suspect=[server for server, flag in enumerate(outcome.servers_suspect) if flag],
                drained=drained,
            )
        if lost:
            self._events.record_warning(f"suspect until new weights prove it again: {', '.join(lost)}")

    def find_asleep(self) -> None:
        """Before the first step: a learner that died in a phase has left servers awake beside this one."""
        if self._b.phases is not None:
            for why in filter(None, run_on_all_ranks(self._control, self._b.phases.put_to_sleep)):
                self._events.record_warning(f"a server does not sleep: {why}")

    def _make_room(self, phases: Phases) -> None:
        with self._events.activity("switching"):
            with self._b.snapshots.explained():
                run_on_all_ranks(
                    self._control, phases.memory.release
                )  # no server wakes beside a rank that holds it
            self.is_asleep = False

    def end_phase(self, step: int, phases: Phases) -> None:
        """Has the servers sleep once nothing is out there, and only then takes the devices' memory back.

        Raises:
            WeightSyncError: the learner's weights cannot be pushed; on every rank.
        """
        b = self._b
        with self._events.activity("switching"):
            if b.updates is not None:
                b.updates.rest()
            while True:  # bounded: what is out there ends by its own deadlines; at a stop the servers end it
                outcome, news = self._agree(step)
                self.apply(step, outcome, news)
                is_out = any(outcome.servers_busy) and not outcome.stop_requested
                if not (outcome.publishing or is_out):
                    break
                time.sleep(_LOOK_S)
            with b.snapshots.explained():
                told = run_on_all_ranks(self._control, phases.put_to_sleep)
            if b.updates is not None:
                b.updates.rested([server for server, why in enumerate(told) if why])
                for url, asked, why in zip(b.base_urls, self.asked, told, strict=True):
                    if why and (asked or "was ended" in why):
                        self._events.record_warning(f"{url} did not go to sleep: {why}")
            phases.memory.take_back()
            self.is_asleep = True

    def _take_news(self, step: int, news: UpdateNews) -> None:
        b = self._b
        for joining in news.joining:
            b.client.learn_kind(b.base_urls[joining.server], joining.kind)
            if self._control.rank == 0:
                logger.info("%s answers; weights are brought to it", b.base_urls[joining.server])
        if news.outcome is not None:
            self._events.record_round(step, news.outcome, self._pending_seconds)
            self._pending_seconds = 0.0

    def _await_version(self, step: int) -> None:
        """Returns when all pushes have ended; bounded by their deadlines.

        The first proof shortens the others' time, except in phases: a server that was started again loads only now.
        """
        while True:
            outcome, news = self._agree(step)
            self.apply(step, outcome, news)
            # Who is to sleep again must not be left in the middle of an install.
            may_leave = outcome.stop_requested and self._b.phases is None
            if may_leave or not self.is_publishing:
                return
            if any(self.asked) and self._b.updates is not None and self._b.phases is None:
                self._b.updates.hurry("after the first proof")
            time.sleep(_LOOK_S)
