"""Evaluation at one version: joins the schedule that all ranks share with this rank's part, and adds their counts up.

Begins, ends and collects at the same step on every rank, because every decision comes from agreed facts. Called by
the learner at every step, on the main thread; ``part.ask`` is called by the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_stage2.channel_b.evaluation import EvaluationEvents, RankEvaluation
from swift_stage2.channel_b.preprocessing import Preprocessor
from swift_stage2.channel_b.rollout_client import RolloutClient
from swift_stage2.channel_b.sample_source import usable_rows
from swift_stage2.channel_b.task import Rows, Task
from swift_stage2.collectives import ControlGroup
from swift_stage2.config import Stage2Config
from swift_stage2.records import EvaluationRecord, Sample
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, EvaluationSchedule
from swift_stage2.scheduling.feasibility_gate import GateOutcome


class PinnedEvaluation:
    """One rank's evaluations, as the learner drives them."""

    def __init__(
        self,
        schedule: EvaluationSchedule,
        part: RankEvaluation,
        *,
        control: ControlGroup,
        record: Callable[[EvaluationRecord], None],
    ) -> None:
        self.part = part
        self._schedule = schedule
        self._control = control
        self._record = record

    @property
    def wanted(self) -> bool:
        """Whether this rank is not finished with what runs: its fact in the step's vector."""
        return self._schedule.running is not None and not self.part.is_finished

    @property
    def unfinished(self) -> int | None:
        """For a checkpoint: the step at which what has not ended fell due."""
        return self._schedule.unfinished

    def resume(self, unfinished: int | None) -> None:
        """Begins again what had not ended when a checkpoint was written."""
        self._schedule.resume(unfinished)

    def holds_round(self, step: int) -> bool:
        """Whether the round that would fall due at ``step`` waits; once it cannot, what runs asks for no more."""
        held = self._schedule.holds_round(step)
        if self._schedule.is_cut:
            self.part.ask_no_more()
        return held

    def observe(
        self, step: int, outcome: GateOutcome, *, version: int, has_server: bool, pending: bool
    ) -> None:
        """Ends what has to end at ``step``, or begins what is due. ``pending``: a round is."""
        reason = self._schedule.reason_to_end(
            step,
            wanted=outcome.evaluation_wanted,
            has_server=has_server,
            pipeline_failed=outcome.pipeline_failed,
            stop_requested=outcome.stop_requested,
        )
        if reason is not None:
            self._end(step, reason)
        # After an end comes the round that was held back, if any, before the next begins.
        may_begin = (
            reason is None
            and has_server
            and not (pending or outcome.pipeline_failed or outcome.stop_requested)
        )
        if (begun := self._schedule.begin_if_due(step, version, may_begin=may_begin)) is not None:
            self.part.begin(begun.version)

    def _end(self, step: int, reason: EvaluationEnd) -> None:
        mine = self.part.end()
        counts = mine.decode(self._control.reduce_sum(mine.encode()))
        end = EvaluationEnd.COMPLETE if counts.is_whole else reason
        # What a stop ends is asked again by the run that resumes.
        ended = self._schedule.end(again=end is EvaluationEnd.TRAINING_ENDS)
        record = EvaluationRecord(ended, step, end, counts)
        self._record(record)


def make_evaluation(
    config: Stage2Config,
    rows: Rows | None,
    task: Task,
    *,
    client: RolloutClient,
    make_request: Callable[[Sample], dict[str, Any]],
    preprocessor: Preprocessor,
    control: ControlGroup,
    events: EvaluationEvents,
    record: Callable[[EvaluationRecord], None],
    last_step: int,
) -> PinnedEvaluation | None:
    """By the section ``stage2_ab.evaluation``; None when it is off. ``rows`` are the validation set's."""
    settings = config.stage2_ab.evaluation
    if not settings.every_steps:
        return None
    policy = config.stage2_ab.channel_b.rows_without_objects
    usable = () if rows is None else usable_rows(rows, task, policy)
    config.check_validation_set(len(usable))
    assert rows is not None
    schedule = EvaluationSchedule(
        every_steps=settings.every_steps,
        max_round_delay_steps=settings.max_round_delay_steps,
        last_step=last_step,
    )
    part = RankEvaluation(
        rows,
        task,
        num_samples=settings.num_samples,
        rank=control.rank,
        world_size=control.world_size,
        client=client,
        make_request=make_request,
        preprocessor=preprocessor,
        decoding=config.rollout.decoding,
        events=events,
        usable=usable,
    )
    return PinnedEvaluation(schedule, part, control=control, record=record)
