"""Sections of sentences, tables, charts and pictures: a report free of any form. ``terminal`` and ``page`` render it.

One source for both, so that they cannot tell different numbers. A chart brings the table that stands behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

MOST_POINTS = 300
"""Of one series."""
GALLERY_KEY = "gallery"
"""The section that only introduces pictures."""


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


class Mark(StrEnum):
    LINE = "line"
    STAIRS = "stairs"
    """Constant from one point to the next."""
    POINTS = "points"


@dataclass(frozen=True, slots=True)
class Series:
    """One named set of points."""

    name: str
    mark: Mark
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over one axis. ``key`` is unique in a report; ``description`` says in words what is drawn."""

    key: str
    title: str
    description: str
    x_title: str = "step"
    y_title: str
    series: tuple[Series, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines by name."""

    @property
    def table(self) -> Table:
        """The drawn numbers, a row per place on the x axis."""
        columns = {series.name: dict(zip(series.x, series.y, strict=True)) for series in self.series}
        places = sorted({place for series in self.series for place in series.x})
        rows = tuple(
            (number(place), *(number(values.get(place)) for values in columns.values())) for place in places
        )
        return Table(self.title, (self.x_title, *columns), rows)


@dataclass(frozen=True, slots=True)
class Headline:
    """The few numbers that a reader came for: (what, value, what it means)."""

    numbers: tuple[tuple[str, str, str], ...]

    @property
    def table(self) -> Table:
        """The same as rows."""
        return Table("", ("what", "value", "meaning"), self.numbers, ends_in_words=True)


Part = Sentence | Table | Chart | Headline


@dataclass(frozen=True, slots=True)
class Section:
    """One heading and what stands under it, in order. ``key`` is unique in a report."""

    key: str
    title: str
    parts: tuple[Part, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    pictures: tuple[Picture, ...]
    num_matches: int
    """Of which the pictures are the first."""


def series_of(mark: Mark, points: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[Series, ...]:
    """One series per name, from its (place, value) pairs."""
    columns = {name: zip(*told, strict=True) if told else ((), ()) for name, told in points.items()}
    return tuple(Series(name, mark, *told) for name, told in columns.items())


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
    """Without what is absent, and without tables and charts that hold nothing."""
    return tuple(
        part
        for part in parts
        if part is not None
        and not (isinstance(part, Table) and not part.rows)
        and not (isinstance(part, Chart) and not any(series.x for series in part.series))
    )


def thinned(
    points: Sequence[tuple[float, float]], summary: Callable[[Sequence[float]], float] = statistics.fmean
) -> list[tuple[float, float]]:
    """At most ``MOST_POINTS``: the ``summary`` of each group of neighbours, at its first place."""
    size = max(1, -(-len(points) // MOST_POINTS))
    groups = (points[begin : begin + size] for begin in range(0, len(points), size))
    return [(group[0][0], summary([value for _, value in group])) for group in groups]
