"""One rank's telemetry: counters, activity clock, event log, trace, and on rank 0 TensorBoard and a line to read.

The learner reports steps, rounds and warnings, the pipeline its own events through ``pipeline``. Ranks meet
only in ``merge_and_write``, at logging steps, through a collective that the caller brings. Nothing here raises for
the disk's sake; ``log.failure`` tells.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swift_stage2.records import RoundOutcome
from swift_stage2.scheduling.evaluation_schedule import EvaluationEnd, RunningEvaluation
from swift_stage2.telemetry.display import StatusLine, TensorBoardSink, scalars_of_merge, scalars_of_plan
from swift_stage2.telemetry.event_log import EventLog, event_path
from swift_stage2.telemetry.events import (
    End,
    Evaluation,
    Losses,
    Metrics,
    Round,
    Start,
    Step,
    Warned,
)
from swift_stage2.telemetry.metrics import PREFIX, Counters, Gather, merged
from swift_stage2.telemetry.recorders import PipelineRecorder
from swift_stage2.telemetry.summary import why_b_is_unused
from swift_stage2.telemetry.timing import ActivityClock, Trace

logger = logging.getLogger(__name__)

_EVALUATE = "swift-stage2 evaluate measures a checkpoint"
_UNANSWERED = {  # why, and what helps, by how an evaluation ended
    EvaluationEnd.ROUND_DUE: "rollouts for training left it no time, lower stage2_ab.schedule.b_ratio or raise "
    "stage2_ab.evaluation.max_round_delay_steps",
    EvaluationEnd.NO_SERVER: f"no proven server was left; {_EVALUATE}",
}


class Telemetry:
    """Everything that is measured on one rank. The main thread's, except for ``counters``, ``log``, ``trace`` and
    ``pipeline``, which any thread may use."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        *,
        tensorboard: bool = True,
        events: bool = True,
        trace: bool = False,
        records: bool = False,
        kept_rows: Container[int] = frozenset(),
        say: Callable[[str], object] | None = None,
        total_steps: int = 0,
        queue_limit: int | None = None,
        reward_terms: Sequence[str] = (),
    ) -> None:
        """``queue_limit`` None means that there is no channel B. ``say`` gets lines for a user.

        ``events`` keeps a log, with ``records`` also of what a replay needs. ``kept_rows`` of the data set have their
        matches kept whole, ``reward_terms`` of rollouts are summed.
        """
        self._run_dir = run_dir
        self._rank = rank
        self._world_size = world_size
        self.counters = Counters(reward_terms)
        self.trace = Trace(trace)
        self.clock = ActivityClock(on_closed=partial(self.trace.record, track="learner"))
        self.activity = self.clock.activity

        self.log = EventLog(event_path(run_dir, rank) if events else None)
        self._records = records
        self.pipeline = PipelineRecorder(self.counters, self.log, self.trace, records, kept_rows)
        self._board = TensorBoardSink(run_dir / "runs" if tensorboard and rank == 0 else None)
        self._say = say
        self._told_ns = self.clock.state_dict()  # by events of steps
        self._status = StatusLine(total_steps, queue_limit)
        self._round_errors: dict[int, str | None] = {}  # by server, of its last round
        self._num_errors: Counter[str] = Counter()  # of servers that a round did not prove
        self._queue_limit = queue_limit
        self._window_start: dict[str, float] = {}
        self._has_started = self._closed = False

    def record_start(self, **facts: Any) -> None:
        """Write down once what a run, or a resumed part of it, begins with: ``facts`` of the event ``Start``."""
        self._has_started = True
        self.log.write(Start(world_size=self._world_size, queue_limit=self._queue_limit, **facts))

    def record_step(self, told: Step) -> None:
        """Count one step when its plan is made, and write it down with the time since the step before."""
        self._count_step(told)
        totals = self.clock.state_dict()
        spent = {activity: ns - self._told_ns[activity] for activity, ns in totals.items()}
        self._told_ns = totals
        activity_ns = {activity: ns for activity, ns in spent.items() if ns}
        self.log.write(told.model_copy(update={"activity_ns": activity_ns}))
        self.trace.record_last("plan", told.plan_seconds)
        self._board.write_scalars(told.step, scalars_of_plan(told), flush=False)

    def record_losses(self, step: int, losses: Sequence[str]) -> None:
        """Keep every micro_step's loss of a step that has trained, as ``float.hex``."""
        if self._records:
            self.log.write(Losses(step=step, losses=tuple(losses)))

    def record_round(self, step: int, outcome: RoundOutcome, pending_seconds: float = 0.0) -> None:
        """Count one sync round that has ended, on every rank, and how long it waited until it could begin.

        It is committed iff a server was proven. A catch-up is no round: the servers that it proved are counted apart.
        """
        committed = bool(outcome.proven)
        if outcome.is_catch_up:
            self.counters.add("sync_servers_caught_up", len(outcome.proven))
        else:
            self.counters.add("sync_rounds_committed" if committed else "sync_rounds_failed")
        servers = {str(server): report for server, report in outcome.reports.items()}
        self.log.write(
            Round.of(
                outcome,
                kind="catch_up" if outcome.is_catch_up else "round",
                step=step,
                committed=committed,
                pending_seconds=pending_seconds,
                servers=servers,
            )
        )
        self._num_errors.update(str(outcome.reports[server].error) for server in outcome.failed)
        for server, report in outcome.reports.items() if self._rank == 0 else ():
            told, self._round_errors[server] = self._round_errors.get(server), report.error
            if report.error and report.error != told:
                self.record_warning(
                    f"the {'catch-up with' if outcome.is_catch_up else 'round of'} version {outcome.version} "
                    f"did not prove a server: {report.error}",
                )

    def record_evaluation(self, told: Evaluation) -> None:
        """Write down an evaluation that has ended, on every rank; its points stand at the step at which it began."""
        self.log.write(told)
        values = {**told.ratios, "num_samples": told.counts.num_answered, "version": told.version}
        scalars = {f"{PREFIX}eval/{name}": float(value) for name, value in values.items()}
        self._board.write_scalars(told.begun_step, scalars)
        if told.counts.num_answered == 0:
            self.record_warning(
                f"the evaluation that began at step {told.begun_step} has no answer to {told.counts.num_wanted} "
                f"samples ({told.end}); {_UNANSWERED.get(told.end, _EVALUATE)}"
            )

    def record_scores(self, run: RunningEvaluation, scores: Mapping[str, float], fault: str = "") -> None:
        """Draw what rank 0 has computed of an evaluation beside training, and tell its ``fault``, if it has one."""
        tags = {f"{PREFIX}eval/{name}": value for name, value in scores.items()}
        self._board.write_scalars(run.begun_step, tags)
        if fault:
            self.record_warning(f"the evaluation that began at step {run.begun_step} is not whole: {fault}")

    @property
    def unused_b(self) -> str:
        """Why fewer than half of the wanted B steps ran, also before a resume; on all ranks alike, else empty."""
        return why_b_is_unused(self.counters.state_dict(), self._num_errors)

    def record_loss(self, loss: float) -> None:
        """Say the line of the last logging step, with the loss that ms-swift logs there: a mean over all ranks."""
        self._say_status(loss)

    def record_warning(self, message: str) -> None:
        """Say or log a warning, and keep it."""
        if self._say is not None:
            self._say(f"warning: {message}")
        else:
            logger.warning("%s", message)
        self.log.write(Warned(message=message))

    def merge_and_write(self, step: int, gather: Gather, *, epoch: float | None = None) -> dict[str, float]:
        """One logging step: add all ranks' numbers up, and write them on rank 0. Called on all ranks alike.

        Returns the scalars by full tag, equal on every rank.
        """
        if self._queue_limit is not None:
            self.counters.set("queue_limit", self._queue_limit)
            self.counters.set("prefetch_last_progress_s_ago", self.pipeline.progress_s_ago)
        numbers, activity_ns = self.counters.snapshot(), self.clock.state_dict()
        told = [json.loads(text) for text in gather(json.dumps([numbers, activity_ns]))]
        totals = merged([numbers for numbers, _ in told])
        spent_ns = {activity: sum(spent[activity] for _, spent in told) for activity in activity_ns}
        values = scalars_of_merge(totals, spent_ns, self._window_start)
        self._say_status(None)  # of a logging step without a loss
        self._status.take(step, epoch, totals)
        self._window_start = totals
        self.counters.set("ver_lag", None)
        self._tell_metrics(step, numbers, activity_ns)
        self._board.write_scalars(step, values)
        return values

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, as JSON."""
        return {
            "counters": self.counters.state_dict(),
            "activity_ns": self.clock.state_dict(),
            "pipeline_ns": self.pipeline.clock.state_dict(),
            "window_start": dict(self._window_start),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; called once, before the first step."""
        self.counters.load_state_dict(state["counters"])
        self.clock.load_state_dict(state["activity_ns"])
        self.pipeline.clock.load_state_dict(state.get("pipeline_ns", {}))
        self._window_start = dict(state["window_start"])
        self._told_ns = self.clock.state_dict()  # earlier processes have told of theirs

    def close(self) -> None:
        """Write what is left and close every file. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._has_started:
            self._tell_metrics(None, self.counters.snapshot(), self.clock.state_dict())
        self.log.close(End() if self._has_started else None)
        if self.log.failure:
            logger.warning("the event log lacks its end: %s", self.log.failure)
        self._board.close()
        self.clock.end_interval()
        if self._queue_limit is not None:
            self.pipeline.clock.end_interval()
        self.trace.save(self._run_dir / "trace" / f"rank{self._rank}.json", self._rank)
        self._say_status(None)

    def _count_step(self, told: Step) -> None:
        add, gauge = self.counters.add, self.counters.set
        add("steps")
        add("b_steps_wanted", int(told.wants_b))
        add("b_steps_run", int(told.channel == "B"))
        if told.skip_reason is not None:
            add(f"b_steps_skipped/{told.skip_reason}")
        add("packs_trained", len(told.packs))
        add("supervised_tokens_trained", told.num_supervised_tokens)
        add("stage_seconds/plan", told.plan_seconds)
        if self._queue_limit is not None:
            gauge("queue_depth", told.queue_depth)
            gauge("ver_current", told.version)
            gauge("sync_pending", int(told.version_pending))
            gauge("sync_in_transfer", int(told.version_in_transfer))
            gauge("infer_inflight", told.infer_in_flight)
            if told.version_lag is not None:
                self.counters.raise_to("ver_lag", told.version_lag)

    def _tell_metrics(
        self, step: int | None, numbers: Mapping[str, float], activity_ns: Mapping[str, int]
    ) -> None:
        pipeline_ns = None if self._queue_limit is None else self.pipeline.clock.state_dict()
        self.log.write(Metrics(step=step, numbers=numbers, activity_ns=activity_ns, pipeline_ns=pipeline_ns))

    def _say_status(self, loss: float | None) -> None:
        if (line := self._status.line(loss)) and self._say is not None:
            self._say(line)
