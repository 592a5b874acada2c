"""The two forms of a report's sections: one HTML page that needs nothing else, and text on a terminal.

Style and pictures are inside the page, and no script; every text is escaped; it is written whole or not at all. A
terminal shows all but pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from swift_stage2.errors import UserError
from swift_stage2.report.content import Headline, Part, Section, Sentence, Table, Tone
from swift_stage2.whole_file import write_whole

_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "bold red"}

_GAP = 2  # between columns


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """A page before it is drawn. ``places`` are paths."""

    heading: str
    places: Sequence[str]
    state: str
    """State of the run or evaluation, in a few words."""
    sections: Sequence[Section]


def page_of(report: PageContent) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_page_file("page.html.j2")).render(
        report=report,
        form=lambda part: type(part).__name__,
        style=Markup(_page_file("page.css")),
    )


def write_page(path: Path, text: str) -> None:
    """Puts the page in its place in one move.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        write_whole(path, text, errors="replace", is_private=True)
    except OSError as error:
        raise UserError(
            "the page cannot be written",
            got=f"output={path}: {error.strerror}",
            remedy="name another file with --output",
        ) from error


def _page_file(name: str) -> str:
    return (files("swift_stage2.report") / "page_files" / name).read_text(encoding="utf-8")


def terminal_report(sections: Iterable[Section]) -> RenderableType:
    """Every section under its title, but for those of which the page alone has something to show."""
    lines: list[RenderableType] = []
    for section in sections:
        if shown := list(_lines(section.parts)):
            lines += [Text(f"\n{section.title}", style="bold"), *shown]
    return Group(*lines)


def _lines(parts: Iterable[Part]) -> Iterator[RenderableType]:
    for part in parts:
        match part:
            case Sentence():
                yield Text(part.text, style=_STYLES[part.tone])
            case Headline():
                yield _Fitting(part.table)
            case Table():
                yield _Fitting(part)


class _Fitting:
    """A table in which no number, key or word is broken, as long as the terminal has room for the longest of each."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self._table, column_widths(self._table, options.max_width))


def column_widths(table: Table, width: int) -> list[int] | list[None]:
    """Characters of each column of a table of at most ``width``; None where a word has to be broken."""
    columns = list(zip(table.headings, *table.rows, strict=True))
    least = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    wanted = [max(map(cell_len, column)) - known for column, known in zip(columns, least, strict=True)]
    room = width - _GAP * (len(columns) - 1) - sum(least)
    if room < 0:
        return [None] * len(columns)
    found = list(least)
    for num_left, number in zip(
        range(len(columns), 0, -1), sorted(range(len(columns)), key=wanted.__getitem__), strict=True
    ):
        more = min(wanted[number], room // num_left)
        found[number] += more
        room -= more
    return found


def _table(table: Table, widths: Sequence[int | None]) -> RichTable:
    shown = RichTable(
        title=Text(table.title),
        title_justify="left",
        min_width=len(table.title),
        box=box.SIMPLE_HEAD,
        padding=(0, _GAP - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    last = len(table.headings) - 1
    for number, (heading, width) in enumerate(zip(table.headings, widths, strict=True)):
        is_words = number == 0 or (number == last and table.ends_in_words)
        shown.add_column(Text(heading), justify="left" if is_words else "right", overflow="fold", width=width)
    for number, row in enumerate(table.rows):
        shown.add_row(*(Text(cell) for cell in row), style=_STYLES[table.tones.get(number, Tone.PLAIN)])
    return shown
