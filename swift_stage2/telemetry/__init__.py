"""Counters, gauges, activities and spans of one rank, and where they go: TensorBoard, audit, trace, live view.

    facade             Telemetry, which the learner's side holds; the only name it needs
    recorders          events of the learner, the pipeline and evaluations
    metrics            the one table of numbers, one rank's counters, and their sum over ranks
    activity, trace    where the time goes
    audit, ledger, match_log   what is written of every rank: lines that only grow
    tensorboard, live_view, live_state   what is shown while a run goes on
    record_forms, rank_records, summary  from the audit back to answers
    ledger_account, ledger_replay        what became of all samples

``docs/design/metrics.md`` lists every tag. Knows no ms-swift and issues no collective of its own.
"""
