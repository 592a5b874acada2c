"""Decides when a sync round falls due and which servers it includes; a state machine, identical on all ranks.

Fed only with facts that all ranks agreed on, so every rank reaches the same answer without asking. Between two rounds a
*catch-up* may run: a server that comes late takes the weights of the last round, which nobody has overwritten.
Holds no thread, socket or collective; called by the learner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class AgreedState(StrEnum):
    """Whether rollouts may be asked from a server."""

    UNPROVEN = "unproven"  # never yet part of a proven round of this run
    PROVEN = "proven"
    SUSPECT = "suspect"  # nothing is inferred from it until a later round or a catch-up proves it


@dataclass(slots=True)
class _Underway:
    """A round or a catch-up that has begun and of which not all has been heard."""

    begun_step: int
    is_staged: bool
    is_catch_up: bool = False
    doubted: set[int] = field(default_factory=set)  # became suspect meanwhile


class RoundSchedule:
    """When rounds are due, and whether one runs.

    ``pending`` means due but not yet begun, because some rank is not drained; ``in_transfer``, begun and not yet
    finished, while training goes on. A *staged* round is not drained: its servers are asked on while it runs.

    Every round that begins has a version of its own; one that fails leaves a gap. A catch-up is a transfer without a
    round: it brings the last one's version once more, if that has proven a server. It goes to suspects that answer
    again, and is staged, so that it needs every server that is asked to stage.
    """

    def __init__(
        self,
        num_servers: int,
        sync_every_steps: int,
        *,
        backoff_steps: int,
        max_backoff_steps: int,
        staging: Iterable[int] = (),
        absent: Iterable[int] = (),
    ) -> None:
        """``staging``: servers that take new weights beside the old ones while they answer.

        ``absent``: servers that have not answered at the start. They are suspect, so that nobody waits for them.
        """
        self._sync_every_steps = sync_every_steps
        self._first_backoff_steps = backoff_steps
        self._max_backoff_steps = max_backoff_steps
        self._states = [AgreedState.UNPROVEN] * num_servers
        for server in absent:
            self._states[server] = AgreedState.SUSPECT
        self._backoff_steps = [backoff_steps] * num_servers
        self._retry_step = [0] * num_servers
        self._answers_again = [False] * num_servers
        self._staging = frozenset(staging)
        self._has_finished_one = False
        self._transfer: _Underway | None = None
        self.version = 0
        """Of the round that began last, or that a resumed run begins after."""
        self.is_asked_for = False
        """Whether one is wanted out of turn, and has not begun."""
        self._is_kept = False  # the last round proved a server, and its weights are still there
        self.pending = False
        self.last_commit_step: int | None = None
        """The step from which the next round is counted: a staged round's snapshot, a fenced round's end."""

    @property
    def proven(self) -> tuple[int, ...]:
        """Servers that rollouts may be asked from."""
        return self._in_state(AgreedState.PROVEN)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Servers that failed, or were absent at the start, and wait for a round or a catch-up to prove them."""
        return self._in_state(AgreedState.SUSPECT)

    @property
    def in_transfer(self) -> bool:
        return self._transfer is not None and not self._transfer.is_catch_up

    @property
    def catching_up(self) -> bool:
        return self._transfer is not None and self._transfer.is_catch_up

    @property
    def is_first(self) -> bool:
        """Whether no round has finished yet: training waits for the first one."""
        return not self._has_finished_one

    def states(self) -> tuple[AgreedState, ...]:
        """The state of every server, in the order of the configuration."""
        return tuple(self._states)

    def let_stage(self, server: int) -> None:
        """A server that was absent at the start takes new weights beside the old ones."""
        self._staging |= {server}

    def observe(self, step: int, *, suspect: Iterable[bool], answers_again: Iterable[bool]) -> None:
        """Takes in what all ranks agreed on at ``step``; a round it triggers is due at the next step."""
        for server, (is_suspect, answers) in enumerate(zip(suspect, answers_again, strict=True)):
            if is_suspect and self._states[server] is AgreedState.PROVEN:
                self._suspect(server, step)
            if answers and self._states[server] is AgreedState.SUSPECT:
                self._answers_again[server] = True

    def is_due(self, step: int) -> bool:
        """Whether a round should begin at the start of ``step``; once due it stays pending until it begins."""
        if not self.pending:
            self.pending = self.falls_due(step)
        return self.pending

    def falls_due(self, step: int) -> bool:
        """Whether ``is_due`` would say so at ``step``; nothing becomes pending by it, and nothing during a transfer."""
        return self._transfer is None and self._is_wanted(step)

    def waits_for_catch_up(self, step: int) -> bool:
        """Whether a round would fall due at ``step`` were it not for the catch-up that runs."""
        return self.catching_up and self._is_wanted(step)

    def are_staging(self, servers: Iterable[int]) -> bool:
        """Whether all of ``servers`` take new weights beside the old ones while they answer."""
        return self._staging.issuperset(servers)

    def targets(self, step: int) -> tuple[int, ...]:
        """Servers that a round at ``step`` includes: never one that is dead, so that none delays the rest."""
        return tuple(
            server
            for server, state in enumerate(self._states)
            if state is not AgreedState.SUSPECT or self._may_retry(server, step)
        )

    def begin(self, step: int, *, staged: bool = False) -> None:
        """A round begins at the start of ``step``, with the weights of this moment."""
        self.pending = self._is_kept = self.is_asked_for = False
        self.version += 1
        self._transfer = _Underway(step, staged)

    def begin_catch_up(self, step: int) -> tuple[int, ...]:
        """Begins a catch-up at the start of ``step`` if one can run, and says to whom; called when no round is due."""
        if self._transfer is not None:
            return ()
        targets = tuple(server for server in self.suspects if self._may_catch_up(server, step))
        if targets:
            self._transfer = _Underway(step, is_staged=True, is_catch_up=True)
        return targets

    def finish(
        self, step: int, *, proven: Iterable[int], failed: Iterable[int], ended: bool = True
    ) -> tuple[int, ...]:
        """Takes what was heard of the transfer at ``step``; ``ended``: nothing more will be. Returns whom it proves.

        In a staged round a suspicion may be newer than the proof, and wins. With nothing proven nothing is pending
        afterwards: only ``answers again`` makes a retry due.
        """
        transfer = self._transfer
        assert transfer is not None
        if transfer.is_staged:
            proven = [server for server in proven if server not in transfer.doubted]
        proven = tuple(proven)
        for server in proven:
            self._states[server] = AgreedState.PROVEN
            self._backoff_steps[server] = self._first_backoff_steps
            self._answers_again[server] = False
        for server in failed:
            self._suspect(server, step)
        if proven and not transfer.is_catch_up:
            # Counted from its begin, a slow fenced round would leave servers no time to be asked.
            self.last_commit_step = transfer.begun_step if transfer.is_staged else step
            self._is_kept = True
        if ended:
            self._transfer = None
            if not transfer.is_catch_up:
                self._has_finished_one = True
        return proven

    def _is_wanted(self, step: int) -> bool:
        returning = [server for server in self.suspects if self._may_retry(server, step)]
        if any(not self._may_catch_up(server, step) for server in returning):
            return True
        if AgreedState.UNPROVEN in self._states:
            return True
        if self.last_commit_step is None or not (self.proven or returning):
            return False
        return self.is_asked_for or step - self.last_commit_step >= self._sync_every_steps

    def _may_catch_up(self, server: int, step: int) -> bool:
        """While a stock server is asked none runs: that one's loss shows only between two transfers."""
        return self._is_kept and self._may_retry(server, step) and self.are_staging((server, *self.proven))

    def _may_retry(self, server: int, step: int) -> bool:
        return self._answers_again[server] and step >= self._retry_step[server]

    def _suspect(self, server: int, step: int) -> None:
        self._states[server] = AgreedState.SUSPECT
        if self._transfer is not None:
            self._transfer.doubted.add(server)
        self._answers_again[server] = False
        self._retry_step[server] = step + self._backoff_steps[server]
        self._backoff_steps[server] = min(2 * self._backoff_steps[server], self._max_backoff_steps)

    def _in_state(self, wanted: AgreedState) -> tuple[int, ...]:
        return tuple(server for server, state in enumerate(self._states) if state is wanted)
