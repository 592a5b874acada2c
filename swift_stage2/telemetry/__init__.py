"""Counters, gauges, activities and spans of one rank, and where they go: TensorBoard, audit, trace, live view.

    facade             Telemetry, which the learner's side holds; the only name it needs
    step_recorder      the learner's steps and rounds
    pipeline_recorder  channel B's events
    evaluation_recorder  evaluations
    scalars, merging   from one rank's numbers to all ranks' tags
    counters, metrics  the numbers, and the one table that declares them
    interval_clock, activity, spans   where the time goes
    facts              what is read of the records of other modules
    audit, tensorboard, chart_layout, live_view, live_state  the ways out
    rank_records       what counts of finished audits, rank by rank
    summary, summary_table   from them back to answers
    run_progress       from a growing one to the live view
    match_log          whole matches of a few rows
    ledger             every sample's life
    run_record      what a replay needs besides the ledger
    ledger_history, ledger_replay, ledger_account   what of it survived, the rules, and what became of all samples

``docs/design/metrics.md`` lists every tag. Knows no ms-swift and issues no collective.
"""

from swift_stage2.telemetry.activity import Activity, ActivityClock
from swift_stage2.telemetry.audit import AuditLog, read_audit
from swift_stage2.telemetry.counters import Counters
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.live_state import LiveState
from swift_stage2.telemetry.live_view import LiveView, plain_line, render
from swift_stage2.telemetry.pipeline_recorder import PipelineRecorder
from swift_stage2.telemetry.spans import Trace
from swift_stage2.telemetry.summary import RunSummary, summarise
from swift_stage2.telemetry.summary_table import summary_table
from swift_stage2.telemetry.tensorboard import TensorBoardSink

__all__ = [
    "Activity",
    "ActivityClock",
    "AuditLog",
    "Counters",
    "LiveState",
    "LiveView",
    "PipelineRecorder",
    "RunSummary",
    "Telemetry",
    "TensorBoardSink",
    "Trace",
    "plain_line",
    "read_audit",
    "render",
    "summarise",
    "summary_table",
]
