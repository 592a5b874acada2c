"""The sync rounds: how they ended, and where their seconds went. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
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


def rounds_section(run: RunData) -> Section:
    """Every phase of the sync rounds."""
    rounds = run.first.rounds if run.first else []
    if not rounds:
        return Section("rounds", "Sync rounds", (Sentence("There was no sync round."),))
    servers = [server for record in rounds for server in record["servers"].values()]
    facts = {
        "committed": number(sum(record["committed"] for record in rounds)),
        "failed": number(sum(not record["committed"] for record in rounds)),
    }
    proofs = Counter(
        f"servers proven by {server['proof']}" if server["proven"] else f"server failed: {server['error']}"
        for server in servers
    )
    facts |= {name: number(count) for name, count in proofs.most_common()}
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
