"""Turns a report into tables and lines for a terminal; charts and pictures stay on the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from swift_stage2.report.content import Chart, Headline, Section, Sentence, Table, Tone

_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "bold red"}


def terminal_report(sections: Iterable[Section]) -> RenderableType:
    """Every number that stands outside of charts."""
    return Group(*(line for section in sections for line in _section(section)))


def _section(section: Section) -> Iterator[RenderableType]:
    yield Text(f"\n{section.title}", style="bold")
    for part in section.parts:
        match part:
            case Sentence():
                yield Text(part.text, style=_STYLES[part.tone])
            case Headline():
                yield _table(part.table)
            case Table():
                yield _table(part)
            case Chart():
                pass


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
