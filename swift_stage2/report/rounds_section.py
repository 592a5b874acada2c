"""The sync rounds: how they ended, and where their seconds went. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from swift_stage2.report.content import (
    Chart,
    Mark,
    Section,
    Sentence,
    Table,
    filled,
    number,
    pairs,
    seconds,
    series_of,
)
from swift_stage2.report.run_data import RunData
from swift_stage2.report.steps_over_time import thinned
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.summary import RunSummary


def rounds_section(run: RunData, summary: RunSummary) -> Section:
    """Every phase of the sync rounds."""
    rounds = run.first.rounds if run.first else []
    if not rounds:
        return Section("rounds", "Sync rounds", (Sentence("There was no sync round."),))
    facts = {"committed": number(summary.num_rounds_committed), "failed": number(summary.num_rounds_failed)}
    facts |= {f"servers proven by {proof}": number(count) for proof, count in summary.proofs.items()}
    facts |= {f"server failed: {error}": number(count) for error, count in summary.server_errors.items()}
    by_phase = _phases(rounds)
    rows = tuple(
        (
            phase,
            number(len(points)),
            *(seconds(value) for value in _spread([spent for _, spent in points])),
        )
        for phase, points in by_phase.items()
    )
    chart = Chart(
        key="rounds",
        title="Seconds of a round, by phase",
        description="Each phase of the slowest server, the canary and the export; they overlap, so they do not add up.",
        x_title="step",
        y_title="seconds",
        series=tuple(series_of(phase, Mark.LINE, thinned(points)) for phase, points in by_phase.items()),
    )
    table = Table("Seconds by phase", ("phase", "rounds", "median", "longest", "total"), rows)
    return Section("rounds", "Sync rounds", filled([pairs("Rounds", facts), table, chart]))


def _phases(rounds: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    phases: dict[str, list[tuple[float, float]]] = {}
    for record in rounds:
        for phase, spent in _phases_of(record):
            phases.setdefault(phase, []).append((record["step"], spent))
    return phases


def _phases_of(record: Record) -> Iterator[tuple[str, float]]:
    yield "whole round", record["seconds"]
    yield "canary", record["canary_seconds"]
    yield "export", record["export_seconds"]
    slowest: dict[str, float] = {}
    for server in record["servers"].values():
        for phase, spent in server["seconds"].items():
            slowest[phase] = max(spent, slowest.get(phase, 0.0))
    yield from slowest.items()


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), max(values), sum(values)
