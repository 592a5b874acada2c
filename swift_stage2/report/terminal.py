"""Prints sentences and tables on a terminal: every number of a report that stands outside of charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from swift_stage2.report.content import Headline, Part, Section, Sentence, Table, Tone
from swift_stage2.report.steps import summary_parts
from swift_stage2.telemetry.summary import RunSummary

_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "bold red"}


def terminal_report(sections: Iterable[Section]) -> RenderableType:
    """Every section under its title."""
    lines: list[RenderableType] = []
    for section in sections:
        lines += [Text(f"\n{section.title}", style="bold"), *_lines(section.parts)]
    return Group(*lines)


def summary_table(summary: RunSummary) -> RenderableType:
    """The numbers of a summary."""
    return Group(*_lines(summary_parts(summary)))


def _lines(parts: Iterable[Part]) -> Iterator[RenderableType]:
    for part in parts:
        match part:
            case Sentence():
                yield Text(part.text, style=_STYLES[part.tone])
            case Headline():
                yield _table(part.table)
            case Table():
                yield _table(part)


def _table(table: Table) -> RichTable:
    shown = RichTable(
        title=Text(table.title), title_justify="left", min_width=len(table.title), box=box.SQUARE
    )
    last = len(table.headings) - 1
    for number, heading in enumerate(table.headings):
        is_words = number == 0 or (number == last and table.ends_in_words)
        shown.add_column(Text(heading), justify="left" if is_words else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        shown.add_row(*(Text(cell) for cell in row), style=_STYLES[table.tones.get(number, Tone.PLAIN)])
    return shown
