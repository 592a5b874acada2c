"""Decides when a sync round falls due and which servers it includes; a state machine, identical on all ranks.

Fed only with facts that all ranks agreed on, so every rank reaches the same answer without asking.
Holds no thread, socket or collective; called by the learner.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class ServerState(StrEnum):
    """Whether rollouts may be asked from a server."""

    UNPROVEN = "unproven"  # never yet part of a proven round of this run
    PROVEN = "proven"
    SUSPECT = "suspect"  # nothing is inferred from it until a later round proves it


class RoundSchedule:
    """When rounds are due, and whether one runs.

    ``pending`` means due but not yet begun, because some rank is not drained; ``in_transfer``, begun and not yet
    finished, while training goes on.
    """

    def __init__(
        self, num_servers: int, sync_every_steps: int, *, backoff_steps: int, max_backoff_steps: int
    ) -> None:
        self._sync_every_steps = sync_every_steps
        self._first_backoff_steps = backoff_steps
        self._max_backoff_steps = max_backoff_steps
        self._states = [ServerState.UNPROVEN] * num_servers
        self._backoff_steps = [backoff_steps] * num_servers
        self._retry_step = [0] * num_servers
        self._answers_again = [False] * num_servers
        self._has_finished_one = False
        self.in_transfer = False
        self.pending = False
        self.last_commit_step: int | None = None
        """The step after whose packs the newest proven version began."""

    @property
    def proven(self) -> tuple[int, ...]:
        """Servers that rollouts may be asked from."""
        return self._in_state(ServerState.PROVEN)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Servers that failed and wait for a round to prove them again."""
        return self._in_state(ServerState.SUSPECT)

    @property
    def is_first(self) -> bool:
        """Whether no round has finished yet: training waits for the first one."""
        return not self._has_finished_one

    def states(self) -> tuple[ServerState, ...]:
        """The state of every server, in the order of the configuration."""
        return tuple(self._states)

    def observe(self, step: int, *, suspect: Iterable[bool], answers_again: Iterable[bool]) -> None:
        """Takes in what all ranks agreed on at ``step``; a round it triggers is due at the next step."""
        for server, (is_suspect, answers) in enumerate(zip(suspect, answers_again, strict=True)):
            if is_suspect and self._states[server] is ServerState.PROVEN:
                self._suspect(server, step)
            if answers and self._states[server] is ServerState.SUSPECT:
                self._answers_again[server] = True

    def is_due(self, step: int) -> bool:
        """Whether a round should begin at the start of ``step``; once due it stays pending until it begins."""
        if not self.pending:
            self.pending = self.falls_due(step)
        return self.pending

    def falls_due(self, step: int) -> bool:
        """Whether ``is_due`` would say so at ``step``; nothing becomes pending by it, and nothing during a round."""
        if self.in_transfer:
            return False
        if any(self._may_retry(server, step) for server in self.suspects):
            return True
        if ServerState.UNPROVEN in self._states:
            return True
        if not self.proven or self.last_commit_step is None:
            return False
        return step - self.last_commit_step >= self._sync_every_steps

    def targets(self, step: int) -> tuple[int, ...]:
        """Servers that a round at ``step`` includes: never one that is dead, so that none delays the rest."""
        return tuple(
            server
            for server, state in enumerate(self._states)
            if state is not ServerState.SUSPECT or self._may_retry(server, step)
        )

    def begin(self) -> None:
        """A round begins, with the weights of this moment."""
        self.pending, self.in_transfer = False, True

    def finish(self, step: int, *, proven: Iterable[int], failed: Iterable[int]) -> None:
        """Ends a round. With nothing proven nothing is pending: only ``answers again`` makes a retry due."""
        self.in_transfer, self._has_finished_one = False, True
        proven = tuple(proven)
        for server in proven:
            self._states[server] = ServerState.PROVEN
            self._backoff_steps[server] = self._first_backoff_steps
            self._answers_again[server] = False
        for server in failed:
            self._suspect(server, step)
        if proven:
            # Not the step at which it began: a slow transfer would leave servers no time to be asked.
            self.last_commit_step = step

    def _may_retry(self, server: int, step: int) -> bool:
        return self._answers_again[server] and step >= self._retry_step[server]

    def _suspect(self, server: int, step: int) -> None:
        self._states[server] = ServerState.SUSPECT
        self._answers_again[server] = False
        self._retry_step[server] = step + self._backoff_steps[server]
        self._backoff_steps[server] = min(2 * self._backoff_steps[server], self._max_backoff_steps)

    def _in_state(self, wanted: ServerState) -> tuple[int, ...]:
        return tuple(server for server, state in enumerate(self._states) if state is wanted)
