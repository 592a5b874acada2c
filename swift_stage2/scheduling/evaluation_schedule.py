"""Decides when an evaluation falls due, begins, holds a sync round back, and ends; identical on all ranks.

One evaluation runs at a time, under one version: while it asks, a round that falls due waits, for at most
``max_round_delay_steps`` steps. Then it is cut: it asks for no more, and ends once what was in flight is counted; the
round waits for what is in flight, not for the counting. Fed only with facts that all ranks agreed on; called by the
pinned evaluation at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EvaluationEnd(StrEnum):
    COMPLETE = "complete"
    """Every sample was answered, or given up."""
    ROUND_DUE = "round_due"
    """A sync round could be held back no longer."""
    NO_SERVER = "no_server"
    """No proven server was left."""
    PIPELINE_FAILED = "pipeline_failed"
    """A rank's pipeline died, and with it who asks."""
    TRAINING_ENDS = "training_ends"


@dataclass(frozen=True, slots=True)
class RunningEvaluation:
    due_step: int
    begun_step: int
    version: int
    """Of the weights that every answer must be of."""


class EvaluationSchedule:
    """At most one evaluation runs. One that falls due meanwhile replaces one that fell due before and has not begun."""

    def __init__(self, *, every_steps: int, max_round_delay_steps: int, last_step: int) -> None:
        """``last_step`` is the last one that trains: nothing begins there but the final one, and what runs ends."""
        self._every_steps = every_steps
        self._max_round_delay_steps = max_round_delay_steps
        self._last_step = last_step
        self._due_step: int | None = None
        self._round_due_step: int | None = None
        self._final_step: int | None = None
        self._armed_step = 0
        self.running: RunningEvaluation | None = None
        self.is_cut = False
        """True when the one that runs may ask no more, because a round is due; what is in flight still counts."""

    @property
    def unfinished(self) -> int | None:
        """The step at which what runs, or has still to begin, fell due: a resumed run begins it again."""
        if self._due_step is not None or self.running is None:
            return self._due_step
        return self.running.due_step

    def could_begin_after(self, step: int) -> bool:
        """Whether one has still to begin, and may do so at the step after ``step``."""
        return self._due_step is not None and self.running is None and step + 1 < self._last_step

    def resume(self, unfinished: int | None) -> None:
        self._due_step = unfinished

    def ask_for_final(self, step: int) -> None:
        """Training is over before ``step``: what runs ends, and one more is due, once the final weights are proven."""
        self._due_step = self._final_step = step
        self._last_step = min(self._last_step, step)

    def holds_round(self, step: int) -> bool:
        """True if the running evaluation holds the round that is due or in transfer at ``step``; else it is cut."""
        if self.running is None:
            return False
        if self._round_due_step is None:
            self._round_due_step = step
        self.is_cut |= step - self._round_due_step >= self._max_round_delay_steps
        return not self.is_cut

    def observe_version(self, version: int) -> None:
        """Cuts what runs under another than the clock's ``version``: its round had no more time to wait."""
        self.is_cut |= self.running is not None and self.running.version != version

    def reason_to_end(
        self, step: int, *, wanted: bool, has_server: bool, pipeline_failed: bool, stop_requested: bool
    ) -> EvaluationEnd | None:
        """Why what runs has to end at ``step``, if it has to. ``wanted``: some rank is not finished."""
        if self.running is None:
            return None
        if not wanted:
            return EvaluationEnd.ROUND_DUE if self.is_cut else EvaluationEnd.COMPLETE
        if pipeline_failed:
            return EvaluationEnd.PIPELINE_FAILED
        if stop_requested or (step >= self._last_step and self.running.due_step != self._final_step):
            return EvaluationEnd.TRAINING_ENDS
        return None if has_server else EvaluationEnd.NO_SERVER

    def end(self, *, again: bool = False) -> RunningEvaluation:
        """Ends the one that runs; ``again``: it is due anew, unless a newer one is."""
        ended, self.running, self._round_due_step, self.is_cut = self.running, None, None, False
        assert ended is not None
        if again and self._due_step is None:
            self._due_step = ended.due_step
        return ended

    def begin_if_due(self, step: int, version: int, *, may_begin: bool) -> RunningEvaluation | None:
        """Called at every step, at some again and again; what begins.

        ``may_begin``: a server is asked, and no round is pending.
        """
        if step > self._armed_step and step % self._every_steps == 0 and self._final_step is None:
            self._due_step = self._armed_step = step
        if self._due_step is None or self.running is not None or not may_begin:
            return None
        if step >= self._last_step and self._due_step != self._final_step:
            return None
        self.running, self._due_step = RunningEvaluation(self._due_step, step, version), None
        return self.running
