"""One HTML page of sections and pictures that needs nothing else: style and pictures are inside, no script.

Every text is escaped. Written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from swift_stage2.errors import UserError
from swift_stage2.pages.content import Gallery, Section
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
            f"the page cannot be written, got output={path}: {error.strerror}; name another file with --output"
        ) from error


def _page_file(name: str) -> str:
    return (files("swift_stage2.pages") / "page_files" / name).read_text(encoding="utf-8")
