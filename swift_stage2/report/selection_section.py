"""Turns the selection audit into a section: a table and its warnings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swift_stage2.report import selection
from swift_stage2.report.content import Section, Sentence, Table, Tone
from swift_stage2.report.selection import Comparison

_HEADINGS = ("against", "by", "issued", "trained", "the others", "others larger", "p")
_TITLE = "Whom the run trained"


def selection_section(comparisons: Sequence[Comparison]) -> Section:
    """Comparisons without anybody on the other side are left out; one sentence if that leaves none."""
    met = [found for found in comparisons if found.others.size + found.others.unknown]
    if not met:
        return Section("selection", _TITLE, (Sentence("selection: nothing was dropped or given up"),))
    rows = tuple(_row(found) for found in met)
    tones = {index: Tone.WARN for index, found in enumerate(met) if found.differs}
    table = Table("Selection: median (quartiles) × number", _HEADINGS, rows, tones)
    told = [Sentence(f"! {sentence}", Tone.WARN) for sentence in selection.warnings(met)]
    nothing = Sentence("selection: no difference beyond chance", Tone.GOOD)
    return Section("selection", _TITLE, (table, *(told or [nothing])))


def _row(found: Comparison) -> tuple[str, ...]:
    return (
        str(found.level),
        str(found.trait),
        _shown(found.issued),
        _shown(found.trained),
        _shown(found.others),
        "–" if found.share_larger is None else f"{found.share_larger:.0%} of pairs",
        "too few" if found.p_value is None else f"{found.p_value:.2g}",
    )


def _shown(group: selection.Group) -> str:
    unknown = f", {group.unknown} unknown" if group.unknown else ""
    if group.quartiles is None:
        return f"– × 0{unknown}"
    low, middle, high = group.quartiles
    spread = "" if low == high else f" ({low:g}..{high:g})"
    return f"{middle:g}{spread} × {group.size}{unknown}"
