"""Counters, gauges, activities and spans of one rank, and where they go: TensorBoard, audit, trace, a line to read.

    facade               Telemetry, which the learner's side holds; the only name it needs
    recorders            events of the pipeline and of evaluations
    metrics              the one table of numbers, one rank's counters, and their sum over ranks
    activity, trace      where the time goes
    audit, ledger        what is written of every rank: lines that only grow
    tensorboard, status_line             what is shown while a run goes on
    record_forms, reading                what is read back, checked, without what a resume made void
    summary, ledger_account              what ran and what it cost; what became of all samples

``docs/design/formats.md`` lists every tag. Knows no ms-swift and issues no collective of its own.
"""
