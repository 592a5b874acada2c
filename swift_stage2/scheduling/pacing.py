"""Turns the schedule, the rounds to come, the packs at hand and those in the making into "begin so many packs now".

A pack is worth making iff, at the first wanted B step that lacks it, it will still be fresh. Too early
and it expires unused, too late and the step is skipped; ``docs/design/scheduling.md`` has the maths. Pure:
the pipeline asks whenever places are free; all ranks pace as the slowest does, told by the step's vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swift_stage2.scheduling.bresenham import next_wanted_step, wanted_count
from swift_stage2.scheduling.outlook import Outlook, PacingState, first_step_after
from swift_stage2.scheduling.version_clock import is_fresh

MISSES_BEFORE_CATCHING_UP = 2
BUSY_LOAD = 0.9  # from this load on, forecasts take production as never idle
_ROUNDING = 1e-9
_SHORTEST_PRODUCTION_STEPS = 1e-3  # keeps the rate of an instant server finite


@dataclass(frozen=True, slots=True)
class _Shortage:
    num_packs: int
    """Packs lacking that would be fresh if made now."""
    step: int | None
    """The first wanted step that lacks packs, fresh or not; None when none does within the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacer:
    """The pacing rule of one rank. Holds settings, no state."""

    b_ratio: float
    version_window: int
    sync_every_steps: int
    target_packs: int
    """``prefetch_target_packs``: the most packs at hand that are of use."""
    packs_per_b_step: int
    """``gradient_accumulation_steps``."""

    def decide(self, state: PacingState) -> int:
        """Returns the number of packs to start now, those already in the making not counted.

        While a round is pending the answer holds for a start right after it, so the caller can wait for
        its ticket; it should ask again with the ticket in hand.
        """
        if self.b_ratio == 0:
            return 0
        coming = [pack.version for pack in state.in_making]
        at_hand = (*state.ready_versions, *coming)
        outlook = self._outlook(state)
        room = self.target_packs - self._num_fresh_next(outlook, self._wanted_from(state.step + 1), at_hand)
        if room <= 0:
            return 0
        if state.pace is None:  # making some tells how long a production takes
            return self._decide_blindly(state)
        if (quick := self._shortage(outlook, state.holding_pace.quick_steps)).num_packs:
            return min(room, quick.num_packs)
        typical = self._shortage(outlook, state.holding_pace.typical_steps)
        if typical.num_packs and self._is_last_call(outlook, typical.step):
            return min(room, typical.num_packs)
        # The forecast is not trusted once wanted steps in a row were missed.
        return self._decide_blindly(state) if state.missed_in_a_row >= MISSES_BEFORE_CATCHING_UP else 0

    def is_starving(self, state: PacingState) -> bool:
        """Say whether fewer ready packs than a B step needs will be fresh at the next wanted one."""
        step = next_wanted_step(state.step + 1, self.b_ratio)
        return (
            step is not None
            and self._num_fresh_next(self._outlook(state), step, state.ready_versions) < self.packs_per_b_step
        )

    def next_version(self, state: PacingState) -> int:
        """Return the version that the next wanted step will reserve against, by the forecast."""
        return self._outlook(state).rounds_if_idle().version_at(self._wanted_from(state.step + 1))

    def load(self, state: PacingState) -> float:
        """Return the share of its time that production must work to meet the schedule's need; over 1 it cannot.

        A fenced round follows ``sync_every_steps`` steps in which productions start back to back, as soon as
        the last of them has ended; production starts again after it. Staged rounds let it start at once.
        """
        needed_per_step = self.b_ratio * self.packs_per_b_step
        return needed_per_step * self._steps_per_production(state) / state.packs_per_production

    def _decide_blindly(self, state: PacingState) -> int:
        """Fill up to the target without a forecast: what is fresh now counts, so no version is made twice over."""
        num_fresh = sum(
            is_fresh(version, current=state.current_version, window=self.version_window)
            for version in (*state.ready_versions, *(pack.version for pack in state.in_making))
        )
        return max(0, self.target_packs - num_fresh)

    def _num_fresh_next(self, outlook: Outlook, step: int, versions: Sequence[int]) -> int:
        """Count the packs of ``versions`` that will be fresh at ``step``, the next wanted one."""
        current = outlook.rounds_if_idle().version_at(step)
        return sum(is_fresh(version, current=current, window=self.version_window) for version in versions)

    def _shortage(self, outlook: Outlook, holding_steps: float) -> _Shortage:
        """Walk the wanted steps to come, oldest packs first, and count what they lack and packs made now can fill.

        A pack in the making is at hand from the step on at which it can be reserved.
        """
        state, arrival = outlook.state, outlook.arrival
        forecast = outlook.rounds_if_made(holding_steps)
        now = first_step_after(state.position)
        left = [(version, now) for version in state.ready_versions]
        left += [(pack.version, max(now, first_step_after(pack.arrival))) for pack in state.in_making]
        left.sort()
        num_packs, first_lacking = 0, None
        step = self._wanted_from(state.step + 1)
        while num_packs < self.target_packs:
            current = forecast.version_at(step)
            left = [pack for pack in left if is_fresh(pack[0], current=current, window=self.version_window)]
            at_hand = [pack for pack in left if pack[1] <= step][: self.packs_per_b_step]
            lacking = self.packs_per_b_step - len(at_hand)
            if step >= arrival and lacking:
                first_lacking = step if first_lacking is None else first_lacking
                if not is_fresh(outlook.version_at_start, current=current, window=self.version_window):
                    break
                num_packs += lacking
            if step >= arrival or not lacking:
                for pack in at_hand:
                    left.remove(pack)
            out_of_reach = len(left) < self.packs_per_b_step
            step = self._wanted_from(max(step + 1, arrival) if out_of_reach else step + 1)
        return _Shortage(num_packs, first_lacking)

    def _is_last_call(self, outlook: Outlook, step: int | None) -> bool:
        """Say whether a production that starts one step later would typically miss ``step``."""
        later = first_step_after(outlook.start) + outlook.state.arrival_pace.typical_steps
        return step is not None and first_step_after(later) > step

    def _wanted_from(self, step: int) -> int:
        wanted = next_wanted_step(step, self.b_ratio)
        assert wanted is not None, "b_ratio 0 is answered before any forecast"
        return wanted

    def _outlook(self, state: PacingState) -> Outlook:
        return Outlook(state, self.sync_every_steps, self._spacing(state))

    def _spacing(self, state: PacingState) -> int:
        """Return the steps between rounds: as configured, or one busy cycle when production hardly ever idles."""
        return self._busy_cycle(state) if self._hardly_idles(state) else self.sync_every_steps

    def _hardly_idles(self, state: PacingState) -> bool:
        """Say whether forecasts must take production as always at work.

        With rounds at their configured spacing, the packs of one production stay fresh for the wanted
        steps of ``version_window`` spacings. Where always working production would have to serve more
        wanted steps than these, one after the other is needed and the rounds will not come so often.
        """
        servable = max(1, wanted_count(self.version_window * self.sync_every_steps, self.b_ratio))
        wanted = self.b_ratio * self._steps_per_production(state)
        return wanted > servable + _ROUNDING or self.load(state) >= BUSY_LOAD

    def _steps_per_production(self, state: PacingState) -> float:
        """Return the steps from one production's start to the next one's when none waits but for rounds."""
        if state.rounds_are_staged:
            return _busy_steps(state)
        return self._busy_cycle(state) / self._productions_per_cycle(state)

    def _busy_cycle(self, state: PacingState) -> int:
        """Return the steps between rounds when production never idles but for them."""
        if state.rounds_are_staged:  # one is installed between two productions
            return max(self.sync_every_steps, math.ceil(_busy_steps(state)))
        busy_steps = self._productions_per_cycle(state) * state.holding_pace.typical_steps
        return max(self.sync_every_steps, first_step_after(busy_steps))

    def _productions_per_cycle(self, state: PacingState) -> int:
        return math.ceil(self.sync_every_steps / _busy_steps(state))


def _busy_steps(state: PacingState) -> float:
    """Return how long a production of the slowest rank takes, never nothing."""
    return max(state.arrival_pace.slower(state.slowest_pace).typical_steps, _SHORTEST_PRODUCTION_STEPS)


def max_prompts_in_flight(max_inflight_per_server: int, num_proven_servers: int, world_size: int) -> int:
    """Return how many prompts one rank may have in flight: its share of the proven servers, at least one.

    Raises:
        ValueError: ``max_inflight_per_server`` or ``world_size`` < 1, or ``num_proven_servers`` < 0.
    """
    if max_inflight_per_server < 1 or world_size < 1 or num_proven_servers < 0:
        raise ValueError(
            "prompts in flight are shared by at least one rank and one slot per server, got "
            f"max_inflight_per_server={max_inflight_per_server} num_proven_servers={num_proven_servers} "
            f"world_size={world_size}"
        )
    return max(1, max_inflight_per_server * num_proven_servers // world_size)
