"""Turns a rank's snapshot into what will have happened: which packs arrive when, which rounds run when.

A POST in flight keeps the fence from draining, so no round runs before it has ended; while a round is
pending no POST starts before the round. Called by the pacer only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from swift_stage2.scheduling.pacing_state import PacingState, PacksInMaking
from swift_stage2.scheduling.round_forecast import RoundForecast, first_step_after


@dataclass(frozen=True, slots=True)
class Outlook:
    """The near future of one rank, as far as it follows from what is known now."""

    state: PacingState
    sync_every_steps: int
    spacing: int
    """Steps between rounds beyond the next one."""

    @property
    def start(self) -> float:
        """The position at which a POST asked for now is sent."""
        return self._drained_step if self.state.round_pending else self.state.position

    @property
    def version_at_start(self) -> int:
        """The version of the packs that such a POST makes."""
        return self.state.current_version + self.state.round_pending

    @property
    def arrival(self) -> int:
        """The first step that can reserve them, if their production is a typical one."""
        return first_step_after(self.start + self.state.arrival_pace.typical_steps)

    def packs_at_hand(self) -> Iterator[tuple[int, int]]:
        """Yield (first step that can reserve it, version) of every pack, ready or in the making, oldest first."""
        for version in self.state.ready_versions:
            yield self.state.step + 1, version
        for production in self.state.making:
            arrival = first_step_after(self._end_of(production))
            for _ in range(production.num_packs):
                yield arrival, production.version

    def rounds_if_idle(self) -> RoundForecast:
        """Forecast the rounds when no production is started on top of what is in flight."""
        pending = self.state.round_pending
        first = self._drained_step if pending else max(self._due_step, self._drained_step)
        return RoundForecast(self.state.current_version, (first,), self.spacing)

    def rounds_if_made(self, holding_steps: float) -> RoundForecast:
        """Forecast the rounds when a production starts now and holds the next one for ``holding_steps``."""
        # A production that ends with a step's start may release that step's round: the earlier one ages more.
        held_until = max(self.state.step + 1, math.ceil(self.start + holding_steps), self._drained_step)
        if self.state.round_pending:
            pending = self._drained_step
            rounds: tuple[int, ...] = (pending, max(pending + self.sync_every_steps, held_until))
        else:
            rounds = (max(self._due_step, held_until),)
        return RoundForecast(self.state.current_version, rounds, self.spacing)

    @property
    def _due_step(self) -> int:
        return self.state.last_commit_step + self.sync_every_steps

    @property
    def _drained_step(self) -> int:
        """The first step at whose start nothing that is in flight now still is."""
        ends = [first_step_after(self._end_of(production)) for production in self.state.making]
        return max([self.state.step + 1, *ends])

    def _end_of(self, production: PacksInMaking) -> float:
        remaining_steps = self.state.arrival_pace.typical_steps - production.age_steps
        return self.state.position + max(0.0, remaining_steps)
