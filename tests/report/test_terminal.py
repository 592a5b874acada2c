"""What a terminal shows: no heading above nothing, no word broken where there is room for it."""

from __future__ import annotations

import io

from hypothesis import strategies as st
from rich.console import Console

from swift_stage2.report.content import Gallery, Part, Section, Sentence, Tone, terminal_report

KEY = "stage2_ab.channel_b.prefetch.sync_every_steps"
CELLS = st.text("ab ", max_size=30)


def shown(*sections: Section, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(terminal_report(sections))
    return stream.getvalue().splitlines()


def section(*parts: Part) -> Section:
    return Section("key", "Heading", parts)


def test_a_heading_stands_above_something() -> None:
    assert shown(section()) == shown(section(Gallery("50 of 90 images", ()))) == []
    warning = Sentence("2 lines are left out", Tone.WARN)
    assert [line for line in shown(section(warning)) if line] == ["Heading", warning.text]
