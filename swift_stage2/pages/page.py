"""One HTML page of sections and pictures that needs nothing else: style, script, plotly and pictures are inside.

Every text is escaped by the template. Charts and pictures are for the script, as JSON in which no tag can begin.
Written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from swift_stage2.errors import UserError
from swift_stage2.pages.content import Chart, Section
from swift_stage2.pages.pictures import Gallery
from swift_stage2.whole_file import write_whole


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
    charts = [part for section in report.sections for part in section.parts if isinstance(part, Chart)]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html.j2")).render(
        report=report,
        form=lambda part: type(part).__name__,
        style=Markup(_text("page.css")),
        script=Markup(_text("page.js")),
        plotly=Markup(get_plotlyjs()) if charts else "",
        charts=_json({chart.key: asdict(chart) for chart in charts}),
        galleries=_json({key: asdict(gallery) for key, gallery in report.galleries.items()}),
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


def _json(value: Any) -> Markup:
    """JSON inside a script element: no character in it can end the element or begin another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _text(name: str) -> str:
    return (files("swift_stage2.pages") / "page_files" / name).read_text(encoding="utf-8")
