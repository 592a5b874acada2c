"""The doctor's rows for a terminal (a table per section, fixes below what was found) and for scripts (JSON). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swift_stage2.doctor.finding import Finding, Verdict

_STYLES = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CHECKED: "dim",
}
_CHECK_COLUMNS = 20


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """A table per section, one row per check, and a line that counts the verdicts."""
    parts: list[RenderableType] = []
    for section, rows in groupby(findings, key=lambda finding: finding.section):
        table = Table(
            title=section,
            title_justify="left",
            title_style="bold",
            show_header=False,
            expand=True,
            box=SIMPLE,
            show_edge=False,
            pad_edge=False,
        )
        table.add_column("check", width=_CHECK_COLUMNS, overflow="fold")
        table.add_column("verdict", width=len(Verdict.WARNING))
        table.add_column("found", ratio=1, overflow="fold")
        for finding in rows:
            table.add_row(finding.check, _verdict(finding), _found(finding))
        parts += [table, Text()]
    return Group(*parts, summary_line(findings))


def summary_line(findings: Sequence[Finding]) -> Text:
    """``12 ok, 1 warning, 2 failed, 3 not checked``."""
    counts = Counter(finding.verdict for finding in findings)
    parts = [
        Text(f"{counts[verdict]} {verdict}", style=_STYLES[verdict]) for verdict in Verdict if counts[verdict]
    ]
    return Text(", ").join(parts)


def findings_json(findings: Sequence[Finding], **facts: Any) -> dict[str, Any]:
    """The same for a script; ``facts`` are put beside the rows."""
    return {**facts, "findings": [finding.to_json() for finding in findings]}


def _verdict(finding: Finding) -> Text:
    is_shown = finding.verdict is not Verdict.NOT_CHECKED  # that is said in the row's text
    return Text(str(finding.verdict) if is_shown else "-", style=_STYLES[finding.verdict])


def _found(finding: Finding) -> Text:
    if finding.verdict is Verdict.NOT_CHECKED:
        return Text(f"not checked: {finding.found}", style=_STYLES[finding.verdict])
    text = Text(finding.found)
    if finding.fix:
        text.append(f"\nfix: {finding.fix}", style=_STYLES[finding.verdict])
    return text
