"""Turns a run's summary into tables for a terminal. Pure; printed by ``demo``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table

from swift_stage2.telemetry.summary import RunSummary, Spread


def summary_table(summary: RunSummary) -> RenderableType:
    """Every answer of the summary; tables without rows are left out."""
    return Group(*(table for table in _tables(summary) if table.row_count))


def _tables(summary: RunSummary) -> Iterator[Table]:
    yield _pairs("Steps", _steps(summary))
    lags = {f"{lag} behind the learner": f"{n} packs" for lag, n in summary.lag_counts.items()}
    yield _pairs("Version lag of trained packs", lags)
    yield _pairs("Dropped or failed, by cause", {cause: str(count) for cause, count in summary.drops.items()})
    yield _pairs("Quality over the run", {tag: f"{value:.3f}" for tag, value in summary.ratios.items()})
    yield _pairs("Sync rounds", _rounds(summary))
    yield _round_times(summary)
    yield _activities(summary)


def _steps(summary: RunSummary) -> dict[str, str]:
    rows = {
        "optimizer steps": str(summary.num_steps),
        "B wanted": str(summary.num_b_wanted),
        "B run": f"{summary.num_b_run}{_share(summary.num_b_run, summary.num_b_wanted)}",
    }
    rows["B skipped"] = str(sum(summary.skips.values()))
    rows |= {f"B skipped: {reason}": str(count) for reason, count in summary.skips.items()}
    if summary.num_disagreements:
        rows["plans that differ between ranks"] = str(summary.num_disagreements)
    if summary.num_records_lost:
        rows["audit records lost (full disk or damaged file)"] = str(summary.num_records_lost)
    if summary.missing_ranks:
        rows["ranks whose audit is missing"] = ", ".join(map(str, summary.missing_ranks))
    return rows


def _rounds(summary: RunSummary) -> dict[str, str]:
    if not summary.num_rounds_committed + summary.num_rounds_failed:
        return {}
    rows = {"committed": str(summary.num_rounds_committed), "failed": str(summary.num_rounds_failed)}
    rows |= {f"servers proven by {kind}": str(count) for kind, count in summary.proofs.items()}
    return rows | {f"server failed: {error}": str(count) for error, count in summary.server_errors.items()}


def _round_times(summary: RunSummary) -> Table:
    table = Table(title="Sync round, seconds by phase", title_justify="left")
    for heading in ("phase", "times", "median", "longest", "total"):
        table.add_column(heading, justify="left" if heading == "phase" else "right", overflow="fold")
    phases: dict[str, Spread] = dict(summary.phase_seconds)
    if summary.round_seconds is not None:
        phases["whole round"] = summary.round_seconds
    for phase, spread in phases.items():
        numbers = (spread.median_s, spread.max_s, spread.total_s)
        table.add_row(phase, str(spread.num), *(f"{seconds:.3f}" for seconds in numbers))
    return table


def _activities(summary: RunSummary) -> Table:
    table = Table(title="Main thread, seconds by activity", title_justify="left")
    table.add_column("rank", justify="right")
    spent = (name for rank in summary.activity for name, seconds in rank.seconds.items() if seconds)
    names = list(dict.fromkeys(spent))
    for name in (*names, "wall"):
        table.add_column(name, justify="right", overflow="fold")
    for rank in summary.activity:
        table.add_row(
            str(rank.rank),
            *(
                f"{rank.seconds.get(name, 0):.2f}{_share(rank.seconds.get(name, 0), rank.wall_s)}"
                for name in names
            ),
            f"{rank.wall_s:.2f}",
        )
    return table


def _pairs(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _share(part: float, whole: float) -> str:
    return f" ({part / whole:.0%})" if whole else ""
