"""Drives one rank's sync rounds on its main thread: begins a due one, hears of it, moves clock, trust and fence.

A *fenced* round waits until no rank has anything in flight, and nothing is asked until it has ended. A *staged* round,
whose servers all take new weights beside the old ones, begins at once, and rollouts go on. So does a *catch-up*, which
brings the last round's weights to servers that come late. Every decision comes from agreed facts, so all ranks take the
same at the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict

from swift_stage2.channel_b.rollouts import ServedWeights
from swift_stage2.collectives import ControlGroup
from swift_stage2.learner.parts import ChannelB
from swift_stage2.records import RoundOutcome
from swift_stage2.servers.probe import JoiningServer
from swift_stage2.telemetry.facade import Telemetry

logger = logging.getLogger(__name__)


class LearnerRounds:
    def __init__(self, parts: ChannelB, control: ControlGroup, events: Telemetry) -> None:
        self._b = parts
        self._control = control
        self._events = events
        self._is_staged = False  # of the round that is pending, or of what is in transfer
        self._is_proven = False  # by a first server
        self._pending_since: float | None = None  # moment at which the pending round fell due
        self._pending_seconds = 0.0  # of the round in transfer
        self._served: dict[int, ServedWeights] = {}  # by server, as last proven

    @property
    def holds_production(self) -> bool:
        """Whether a rollout that is asked for now waits for the end of a round."""
        rounds = self._b.rounds
        return not self._is_staged and (rounds.pending or rounds.in_transfer)

    @property
    def awaits_version(self) -> bool:
        """Whether a round is in transfer of which no proof has been heard: the next version may come at any step."""
        return self._b.rounds.in_transfer and not self._is_proven

    @property
    def are_staged(self) -> bool:
        """Whether rounds with the servers that are proven now are staged."""
        return self._b.rounds.are_staging(self._b.rounds.proven)

    def begin_if_due(self, step: int) -> None:
        """Begins a round at the start of ``step`` if one is due, and if need be drained.

        Waits for the end of the first one, and of each in mode inline.

        An evaluation holds back a fenced round, and only the installs of a staged one. If none is due, a catch-up
        begins where one can run.

        Raises:
            WeightSyncError, WeightSyncHang: as ``WeightSync.begin`` and, for the first round, ``hear``.
        """
        b = self._b
        is_held = b.evaluation is not None and b.rounds.falls_due(step) and b.evaluation.holds_round(step)
        if is_held and not self._may_be_staged(step):
            return
        if not b.rounds.is_due(step):
            self._catch_up_if_possible(step)
            return
        if self._pending_since is None:
            self._pending_since = time.monotonic()
        self._is_staged = self._may_be_staged(step)
        if not self._is_staged and not self._drain(step):
            return  # stays pending; training goes on
        targets = b.rounds.targets(step)
        b.rounds.begin(step, staged=self._is_staged)
        self._is_proven = False
        self._pending_seconds = time.monotonic() - self._pending_since
        self._pending_since = None
        if not targets:
            b.rounds.finish(step, proven=(), failed=())
            self._expect_next()
            return
        if self._is_staged:
            b.client.clear_suspicion(
                [b.base_urls[index] for index in targets if index not in b.rounds.proven]
            )
            if b.rounds.proven:  # it was pending for a stock server that is suspect by now
                b.fence.reopen(b.clock.current)
        b.probe.pause()
        with self._events.activity("syncing"):
            b.sync.begin(b.rounds.version, targets, staged=self._is_staged, held=is_held, step=step)
        if b.rounds.is_first or b.longest_fill_s is not None:
            self.take_in(step, self.hear())

    def hear(self) -> RoundOutcome:
        """Tells what has come of what is in transfer; a collective. Raises as ``WeightSync.hear`` does."""
        with self._events.activity("syncing"):
            return self._b.sync.hear()

    def take_in(self, step: int, outcome: RoundOutcome) -> None:
        """Moves clock, trust and fence. The first proof of a round advances the clock."""
        b = self._b
        proven = b.rounds.finish(
            step,
            proven=[server for server in outcome.proven if server in outcome.news],
            failed=[server for server in outcome.failed if server in outcome.news],
            ended=outcome.ended,
        )
        self._is_proven |= bool(proven)
        if proven and b.clock.current < outcome.version:
            b.clock.advance(outcome.version)
        for server in proven:
            self._served[server] = ServedWeights(outcome.version, outcome.reports[server].stamps, step)
        served = {b.base_urls[index]: self._served[index] for index in b.rounds.proven}
        b.client.set_proven(served, drained=not self._is_staged)
        b.probe.watch([b.base_urls[index] for index in b.rounds.suspects])
        if b.rounds.proven:
            b.fence.reopen(b.clock.current)
        if outcome.ended:
            self._expect_next()
            b.probe.go_on()
            self._events.record_round(step, outcome, self._pending_seconds)

    def take_in_suspects(self, step: int, suspect: Sequence[bool], answers_again: Sequence[bool]) -> None:
        """Takes the facts that all ranks agreed on at ``step``: by server, who is suspect and which suspect answers."""
        b = self._b
        before = b.rounds.proven
        b.rounds.observe(step, suspect=suspect, answers_again=answers_again)
        lost_servers = [index for index in before if index not in b.rounds.proven]
        if not lost_servers:
            return
        lost = [b.base_urls[index] for index in lost_servers]
        b.sync.distrust(lost_servers)
        # Only withdrawn, never re-proven here: this rank may meanwhile suspect another server.
        b.client.stop_requests(lost)
        b.probe.watch([b.base_urls[index] for index in b.rounds.suspects])
        if not b.rounds.proven:
            b.fence.close()
        self._events.record_warning(
            f"suspect until a sync round proves it again: {', '.join(lost)}",
        )

    def take_in_joining(self) -> None:
        """Tells all ranks the kinds of servers that were absent at the start and have answered; a collective."""
        b = self._b
        joining = b.probe.take_joining() if self._control.rank == 0 else ()
        for told in self._control.broadcast([asdict(server) for server in joining]):
            server = JoiningServer(**told)
            if server.stages:
                b.rounds.let_stage(b.base_urls.index(server.base_url))
            if server.chat_model is not None:
                b.client.learn_chat_model(server.base_url, server.chat_model)
            if self._control.rank == 0:
                logger.info("%s answers; a catch-up or a round brings it weights", server.base_url)

    def _catch_up_if_possible(self, step: int) -> None:
        b = self._b
        if b.rounds.waits_for_catch_up(step):
            b.sync.hurry()
        if targets := b.rounds.begin_catch_up(step):
            self._is_staged = True
            b.client.clear_suspicion([b.base_urls[index] for index in targets])
            b.sync.catch_up(targets, version=b.rounds.version)

    def _may_be_staged(self, step: int) -> bool:
        rounds = self._b.rounds
        return not rounds.is_first and rounds.are_staging(rounds.targets(step))

    def _drain(self, step: int) -> bool:
        """Closes the fence and asks all ranks whether anybody is busy; True when nothing is in flight anywhere."""
        b = self._b
        b.fence.close()
        # In this order: who gives up an abandoned POST makes its server suspect in the same moment.
        busy = b.fence.in_flight > 0 or b.client.num_unsettled > 0
        suspects = b.client.suspects
        vector = [int(busy), *(int(url in suspects) for url in b.base_urls)]
        any_busy, *suspect = self._control.reduce_max(vector)
        # Such a server may still compute: it must be out of this very round, not of the next.
        self.take_in_suspects(step, [flag > 0 for flag in suspect], [False] * len(suspect))
        return not any_busy

    def _expect_next(self) -> None:
        """Long before it begins: rank 0 may begin a staged round, and a server install it, while others still train."""
        self._b.client.expect(self._b.rounds.version + 1)
