"""Turns what a demo run left behind into its final tables and its verdict. Pure; printed by the demo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swift_stage2.demo.detection_score import DetectionScore
from swift_stage2.telemetry.summary import RunSummary, summary_table

WANTED_B_SHARE = 0.8
_CLOCK_TOLERANCE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What one demo showed."""

    summary: RunSummary
    before: DetectionScore
    after: DetectionScore
    num_steps_wanted: int
    left_processes: tuple[str, ...]
    held_ports: tuple[int, ...]


def outcome_view(outcome: DemoOutcome) -> RenderableType:
    """Every table, then what was left behind, then what was not as it should be."""
    problems = problems_of(outcome)
    lines = [Text(_left_behind(outcome)), *(Text(f"! {problem}", style="bold red") for problem in problems)]
    if not problems:
        lines.append(Text("Everything ran and ended as it should.", style="green"))
    return Group(summary_table(outcome.summary), score_table(outcome), *lines)


def score_table(outcome: DemoOutcome) -> Table:
    """Held-out detection before and after."""
    scenes = outcome.before.num_images
    table = Table(title=f"Held-out detection, {scenes} scenes, greedy, IoU 0.5", title_justify="left")
    table.add_column("")
    for heading in ("F1", "precision", "recall", "mean IoU"):
        table.add_column(heading, justify="right")
    for name, score in (("before (stage 1)", outcome.before), ("after", outcome.after)):
        values = (score.f1, score.precision, score.recall, score.mean_iou)
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table


def problems_of(outcome: DemoOutcome) -> tuple[str, ...]:
    """What keeps a demo from being a success, one line each."""
    return tuple(_problems(outcome))


def _problems(outcome: DemoOutcome) -> Iterator[str]:
    summary = outcome.summary
    if summary.num_steps != outcome.num_steps_wanted:
        yield f"{summary.num_steps} of {outcome.num_steps_wanted} optimizer steps ran"
    if summary.num_b_run < WANTED_B_SHARE * summary.num_b_wanted:
        wanted = f"{WANTED_B_SHARE:.0%} of {summary.num_b_wanted} wanted"
        yield f"channel B must run at {wanted} steps at least, it ran at {summary.num_b_run}"
    if summary.num_disagreements:
        yield f"ranks disagreed about {summary.num_disagreements} steps"
    for error, count in summary.server_errors.items():
        yield f"a server failed {count} sync rounds: {error}"
    for rank in summary.activity:
        gap_s = abs(sum(rank.seconds.values()) - rank.wall_s)
        if gap_s > _CLOCK_TOLERANCE_S:
            yield f"rank {rank.rank}'s activities miss its wall time by {gap_s:.3f} s"
    if outcome.left_processes:
        yield f"processes are left: {', '.join(outcome.left_processes)}"
    if outcome.held_ports:
        yield f"ports are still held: {', '.join(map(str, outcome.held_ports))}"


def _left_behind(outcome: DemoOutcome) -> str:
    processes = len(outcome.left_processes) or "no"
    ports = len(outcome.held_ports) or "no"
    return f"Left behind: {processes} process, {ports} port."
