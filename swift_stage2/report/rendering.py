"""The two forms of a report's sections: one HTML page that needs nothing else, and text on a terminal.

Style and pictures are inside the page, and no script; every text is escaped. A terminal shows all but pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from swift_stage2.report.content import Headline, Part, Section, Sentence, Table, Tone

_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "bold red"}


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
                yield _table(part.table)
            case Table():
                yield _table(part)


def _table(table: Table) -> RichTable:
    shown = RichTable(
        title=Text(table.title),
        title_justify="left",
        min_width=len(table.title),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    last = len(table.headings) - 1
    for number, heading in enumerate(table.headings):
        is_words = number == 0 or (number == last and table.ends_in_words)
        shown.add_column(Text(heading), justify="left" if is_words else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        shown.add_row(*(Text(cell) for cell in row), style=_STYLES[table.tones.get(number, Tone.PLAIN)])
    return shown
