"""Sections of sentences, tables and pictures, and their two forms: one HTML page that needs nothing else, and text.

One source for both, so that they cannot tell different numbers. Style and pictures are inside the page, and no script;
every text is escaped. A terminal shows all but pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text


class Tone(StrEnum):
    """The weight of a sentence or a row; both forms colour it."""

    PLAIN = "plain"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first column names its row, the last may hold words. ``tones`` by number of the row."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    tones: Mapping[int, Tone] = field(default_factory=dict)
    ends_in_words: bool = False
    is_headline: bool = False
    """The page shows its rows large, side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image with its boxes drawn into it. ``image`` is a data URI, or nothing where ``trouble`` says why not."""

    image: str
    trouble: str
    name: str
    facts: tuple[str, ...]
    texts: tuple[tuple[str, str], ...]
    """Title and text of what was said and what was true."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures under a sentence; on the page alone."""

    told: str
    pictures: tuple[Picture, ...]


Part = Sentence | Table | Gallery


@dataclass(frozen=True, slots=True)
class Section:
    """One heading and what stands under it, in order; shown if that is anything. ``key`` is unique in a report."""

    key: str
    title: str
    parts: tuple[Part, ...] = ()


def headline(rows: tuple[tuple[str, str, str], ...]) -> Table:
    """The few numbers that a reader came for: (what, value, what it means)."""
    return Table("", ("what", "value", "meaning"), rows, ends_in_words=True, is_headline=True)


def format_number(value: float | None) -> str:
    """As many digits as a reader needs; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def format_seconds(value: float) -> str:
    """Seconds with their unit, three digits of them."""
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"


def pairs(title: str, rows: Mapping[str, str], headings: tuple[str, str] = ("what", "number")) -> Table:
    return Table(title, headings, tuple(rows.items()))


def format_share(part: float, whole: float) -> str:
    """A percentage in brackets; nothing of nothing."""
    return f" ({part / whole:.0%})" if whole else ""


def filled(parts: Iterable[Part | None]) -> tuple[Part, ...]:
    """Without what is absent, and without tables and galleries that hold nothing."""
    return tuple(
        part
        for part in parts
        if part is not None
        and not (isinstance(part, Table) and not part.rows)
        and not (isinstance(part, Gallery) and not part.pictures)
    )


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
    for index, heading in enumerate(table.headings):
        is_words = index == 0 or (index == last and table.ends_in_words)
        shown.add_column(Text(heading), justify="left" if is_words else "right", overflow="fold")
    for index, row in enumerate(table.rows):
        shown.add_row(*(Text(cell) for cell in row), style=_STYLES[table.tones.get(index, Tone.PLAIN)])
    return shown
