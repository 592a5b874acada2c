"""Sections of sentences, tables and pictures: a report free of any form. ``rendering`` has its two forms.

One source for both, so that they cannot tell different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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


@dataclass(frozen=True, slots=True)
class Headline:
    """The few numbers that a reader came for: (what, value, what it means)."""

    numbers: tuple[tuple[str, str, str], ...]

    @property
    def table(self) -> Table:
        """The same as rows."""
        return Table("", ("what", "value", "meaning"), self.numbers, ends_in_words=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image with its boxes drawn into it. ``image`` is a data URI, or nothing where ``trouble`` says why not."""

    image: str
    trouble: str
    name: str
    facts: tuple[str, ...]
    fate: str
    """The outcome in one bold line."""
    texts: tuple[tuple[str, str], ...]
    """Title and text of what was said and what was true."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures under a sentence; on the page alone."""

    told: str
    pictures: tuple[Picture, ...]


Part = Sentence | Table | Headline | Gallery


@dataclass(frozen=True, slots=True)
class Section:
    """One heading and what stands under it, in order; shown if that is anything. ``key`` is unique in a report."""

    key: str
    title: str
    parts: tuple[Part, ...] = ()


def number(value: float | None) -> str:
    """As many digits as a reader needs; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def seconds(value: float) -> str:
    """Seconds with their unit, three digits of them."""
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"


def pairs(title: str, rows: Mapping[str, str], headings: tuple[str, str] = ("what", "number")) -> Table:
    return Table(title, headings, tuple(rows.items()))


def share(part: float, whole: float) -> str:
    """A percentage in brackets; nothing of nothing."""
    return f" ({part / whole:.0%})" if whole else ""


def filled(parts: Iterable[Part | None]) -> tuple[Part, ...]:
    """Without what is absent, and without tables and galleries that hold nothing."""
    return tuple(part for part in parts if part is not None and not _is_empty(part))


def _is_empty(part: Part) -> bool:
    return (isinstance(part, Table) and not part.rows) or (isinstance(part, Gallery) and not part.pictures)
