"""Turns a report into one HTML page that needs nothing else: style, script, plotly and pictures are inside.

Every text is escaped by the template; what the script reads is JSON in which no tag can begin. Written whole or not at
all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from swift_stage2.errors import UserError
from swift_stage2.report.content import Chart, Headline, Limit, Mark, Sentence, Series, Table
from swift_stage2.report.gallery import GALLERY_KEY, Filter
from swift_stage2.report.report import RunReport
from swift_stage2.whole_file import write_whole

_FORMS = {Sentence: "sentence", Table: "table", Chart: "chart", Headline: "headline"}


def page(report: RunReport) -> str:
    """The whole page."""
    charts = [part for section in report.sections for part in section.parts if isinstance(part, Chart)]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html.j2")).render(
        report=report,
        gallery_key=GALLERY_KEY,
        filters=[("all", len(report.gallery.pictures))]
        + [(str(each), report.gallery.count(each)) for each in Filter],
        form=lambda part: _FORMS[type(part)],
        style=Markup(_text("page.css")),
        script=Markup(_text("page.js")),
        plotly=Markup(get_plotlyjs()) if charts else "",
        figures=_json({chart.key: figure(chart) for chart in charts}),
        gallery=_json(asdict(report.gallery)),
    )


def write_page(path: Path, text: str) -> None:
    """Puts the page in its place in one move.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        write_whole(path, text, errors="replace")
    except OSError as error:
        raise UserError(
            f"the page cannot be written, got output={path}: {error.strerror}; name another file with --output"
        ) from error


def _json(value: Any) -> Markup:
    """JSON inside a script element: no character in it can end the element or begin another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _text(name: str) -> str:
    return (files("swift_stage2.report") / "page_files" / name).read_text(encoding="utf-8")


_NUM_COLOURS = 8  # --series-0 and so on in the style sheet
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x")
_PATTERNS = ("", "/", ".", "x", "-", "\\", "|", "+")
_FEW = 60
"""Points up to which each is marked."""


def figure(chart: Chart) -> dict[str, Any]:
    """Plotly's ``data`` and ``layout``; colours are names that the page's style sheet resolves.

    Series differ in colour and in line or marker, so that nobody needs to tell colours apart.
    """
    drawn = [series for series in chart.series if series.x]
    traces = [_trace(series, number) for number, series in enumerate(drawn)]
    places = [place for series in drawn for place in series.x]
    traces += [_limit(limit, min(places), max(places)) for limit in chart.limits if drawn]
    xaxis = {"title": {"text": chart.x_title, "standoff": 8}} | _whole_steps(traces, "x")
    yaxis = {"title": {"text": chart.y_title, "standoff": 8}, "rangemode": "tozero"}
    layout = {"xaxis": xaxis, "yaxis": yaxis | _whole_steps(traces, "y"), "showlegend": len(traces) > 1}
    return {"data": traces, "layout": layout}


def _trace(series: Series, number: int) -> dict[str, Any]:
    colour = f"--series-{number % _NUM_COLOURS}"
    marker = {"color": colour, "symbol": _MARKERS[number % len(_MARKERS)]}
    trace: dict[str, Any] = {"name": series.name, "x": list(series.x), "y": list(series.y), "type": "scatter"}
    match series.mark:
        case Mark.BARS:
            return trace | {"type": "bar", "marker": {"color": colour}}
        case Mark.STACK:
            pattern = {"shape": _PATTERNS[number % len(_PATTERNS)], "size": 6}
            line = {"width": 0.5, "color": colour}
            shown = {"mode": "lines", "stackgroup": "all", "line": line}
            return trace | shown | {"fillcolor": colour, "fillpattern": pattern}
        case Mark.POINTS:
            return trace | {"mode": "markers", "marker": marker | {"size": 7}} | _bounds(series, colour)
    line = {
        "color": colour,
        "dash": _DASHES[number % len(_DASHES)],
        "shape": "hv" if series.mark is Mark.STAIRS else "linear",
        "width": 2,
    }
    mode = "lines+markers" if len(series.x) <= _FEW and series.mark is Mark.LINE else "lines"
    return trace | {"mode": mode, "line": line, "marker": marker | {"size": 6}}


def _whole_steps(traces: Sequence[dict[str, Any]], axis: str) -> dict[str, Any]:
    """Ticks at integers only, where a few of them cover everything."""
    values = [value for trace in traces for value in trace[axis] if value is not None]
    few = values and max(values) <= 10 and all(float(value).is_integer() for value in values)
    return {"dtick": 1} if few else {}


def _bounds(series: Series, colour: str) -> dict[str, Any]:
    if not series.low:
        return {}
    known = [y or 0.0 for y in series.y]
    error = {
        "type": "data",
        "symmetric": False,
        "array": [high - y for y, high in zip(known, series.high, strict=True)],
        "arrayminus": [y - low for y, low in zip(known, series.low, strict=True)],
        "color": colour,
    }
    return {"error_y": error}


def _limit(limit: Limit, first: float, last: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{limit.name} = {limit.value:g}",
        "x": [first, last],
        "y": [limit.value, limit.value],
        "line": {"color": "--limit", "dash": "dash", "width": 2},
    }
