"""Counters, gauges, activities and spans of one rank, and where they go: events, TensorBoard, trace, a line to read.

    facade               Telemetry, which the learner's side holds; the only name it needs
    recorders            what the pipeline and evaluations report
    metrics              the one table of numbers, one rank's counters, and their sum over ranks
    timing               where the time goes
    events, event_log    what is written of every rank, and what is read back
    display              what is shown while a run goes on
    summary, account     what ran and what it cost; what became of all samples

``docs/design/formats.md`` lists every tag and event. Knows no ms-swift and issues no collective of its own.
"""
