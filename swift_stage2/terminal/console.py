"""Rich's console without the control characters of what it shows: paths, labels and words of servers are others'."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from swift_stage2.terminal.output import printable


class SafeConsole(Console):
    """Colours and cursor moves are rich's own; no text brings any."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else "\n".join(map(printable, text.split("\n"))), style, control)
