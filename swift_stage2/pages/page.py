"""One HTML page of sections and pictures that needs nothing else: style, charts and pictures are inside, no script.

A chart is a small SVG: lines, stairs or points over one axis; TensorBoard has the large ones. Its
colours and dashes are the style sheet's, by the number of the series, so that dark pages need no other picture. Every
text is escaped. Written whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from swift_stage2.errors import UserError
from swift_stage2.pages.content import Chart, Gallery, Mark, Section, Series, number
from swift_stage2.whole_file import write_whole

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 22, 40
_NUM_TICKS = 5
_NUM_STYLES = 8  # .series-0 and so on in the style sheet
_FEW = 60  # points up to which each is marked


def svg_of(chart: Chart) -> str:
    """The picture alone; the page puts title, legend and numbers beside it."""
    xs = [place for series in chart.series for place in series.x]
    ys = [value for series in chart.series for value in series.y]
    scale = _Scale(_ticks(xs), _ticks([*ys, *chart.limits.values(), 0.0]))
    parts = [*_axes(chart, scale)]
    for name, value in chart.limits.items():
        y = scale.y(value)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_WIDTH - _RIGHT, y - 4, f"{name} {number(value)}", "end"))
    for index, series in enumerate(chart.series):
        parts.append(f'<g class="series-{index % _NUM_STYLES}">{"".join(_series(series, scale))}</g>')
    label = escape(f"{chart.title}. {chart.description}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


class _Scale:
    """From values to pixels; the outermost ticks are the edges."""

    def __init__(self, x_ticks: list[float], y_ticks: list[float]) -> None:
        self.x_ticks, self.y_ticks = x_ticks, y_ticks

    def x(self, value: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        return round(_LEFT + width * _share(value, self.x_ticks), 1)

    def y(self, value: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - height * _share(value, self.y_ticks), 1)


def _share(value: float, ticks: list[float]) -> float:
    return (value - ticks[0]) / (ticks[-1] - ticks[0])


def _ticks(values: list[float]) -> list[float]:
    """Round numbers around all values, about ``_NUM_TICKS`` of them and at least two."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    wanted = max(high - low, 1e-9 * abs(high)) / _NUM_TICKS or 1 / _NUM_TICKS
    magnitude = 10.0 ** math.floor(math.log10(wanted))
    step = next(each * magnitude for each in (1, 2, 5, 10) if each * magnitude >= wanted * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [each * step for each in range(first, max(last, first + 1) + 1)]


def _axes(chart: Chart, scale: _Scale) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in scale.y_ticks:
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield _text(_LEFT - 6, y + 4, number(round(value, 9)), "end")
    for value in scale.x_ticks:
        yield _text(scale.x(value), bottom + 16, number(round(value, 9)), "middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, chart.x_title, "middle")
    middle = (_TOP + bottom) / 2
    yield (
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_title)}</text>"
    )


def _series(series: Series, scale: _Scale) -> Iterator[str]:
    points = [(scale.x(x), scale.y(y)) for x, y in zip(series.x, series.y, strict=True)]
    if series.mark is not Mark.POINTS and points:
        yield f'<path d="{_path(points, is_stairs=series.mark is Mark.STAIRS)}"/>'
    if series.mark is Mark.POINTS or (series.mark is Mark.LINE and len(points) <= _FEW):
        yield from (f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in points)


def _path(points: list[tuple[float, float]], *, is_stairs: bool) -> str:
    (first_x, first_y), *others = points
    steps = (f"H{x}V{y}" if is_stairs else f"L{x} {y}" for x, y in others)
    return f"M{first_x} {first_y}{''.join(steps)}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """A page before it is drawn. ``places`` are paths; ``galleries`` stand in the sections of their keys."""

    heading: str
    places: Sequence[str]
    state: str
    """State of the run or evaluation, in a few words."""
    sections: Sequence[Section]
    galleries: Mapping[str, Gallery]


def page_of(report: PageContent) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_page_file("page.html.j2")).render(
        report=report,
        form=lambda part: type(part).__name__,
        style=Markup(_page_file("page.css")),
        drawn=lambda chart: Markup(svg_of(chart)),
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
            f"the page cannot be written, got output={path}: {error.strerror}; name another file with --output"
        ) from error


def _page_file(name: str) -> str:
    return (files("swift_stage2.pages") / "page_files" / name).read_text(encoding="utf-8")
