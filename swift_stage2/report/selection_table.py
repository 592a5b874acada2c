"""Turns the selection audit into a table for a terminal and its warnings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swift_stage2.report import selection
from swift_stage2.report.selection import Comparison

_HEADINGS = ("against", "by", "issued", "trained", "the others", "others larger", "p")


def selection_table(comparisons: Sequence[Comparison]) -> RenderableType:
    """Comparisons without anybody on the other side are left out; nothing at all if that leaves none."""
    met = [found for found in comparisons if found.others.size + found.others.unknown]
    if not met:
        return Text("selection: nothing was dropped or given up")
    table = Table(title="Selection: median (quartiles) × number", title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading)
    for found in met:
        table.add_row(
            str(found.level),
            str(found.trait),
            _shown(found.issued),
            _shown(found.trained),
            _shown(found.others),
            "–" if found.share_larger is None else f"{found.share_larger:.0%} of pairs",
            "too few" if found.p_value is None else f"{found.p_value:.2g}",
            style="yellow" if found.differs else "",
        )
    told = [Text(f"! {sentence}", style="yellow") for sentence in selection.warnings(met)]
    return Group(table, *(told or [Text("selection: no difference beyond chance", style="green")]))


def _shown(group: selection.Group) -> str:
    unknown = f", {group.unknown} unknown" if group.unknown else ""
    if group.quartiles is None:
        return f"– × 0{unknown}"
    low, middle, high = group.quartiles
    return f"{middle:g} ({low:g}..{high:g}) × {group.size}{unknown}"
