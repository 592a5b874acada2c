"""What a terminal shows: no heading above nothing, no word broken where there is room for it."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from swift_stage2.report.content import Gallery, Part, Section, Sentence, Table, Tone
from swift_stage2.report.rendering import column_widths, terminal_report

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


def test_a_key_is_whole_beside_words_that_are_wrapped() -> None:
    words = "a round takes 1.2 s and a step 0.3 s; once in 76 steps that is 5%"
    lines = shown(
        section(Table("", ("knob", "now", "try", "because"), ((KEY, "4", "76", words),), ends_in_words=True))
    )
    assert sum(KEY in line for line in lines) == 1
    assert max(map(len, lines)) <= 80
    wrapped = [line[len(KEY) :].split() for line in lines if KEY in line or line.startswith(" " * len(KEY))]
    assert [word for line in wrapped for word in line] == ["4", "76", *words.split()]


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4), st.integers(10, 120))
def test_columns_hold_their_longest_word_and_fill_no_more_than_the_width(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    table = Table("", ("x", "y", "z"), tuple(rows))
    found = column_widths(table, width)
    longest = [
        max(len(word) for row in [table.headings, *rows] for word in row[n].split() or [""]) for n in range(3)
    ]
    whole = [max(len(row[n]) for row in [table.headings, *rows]) for n in range(3)]
    if sum(longest) + 4 > width:
        assert found == [None] * 3
        return
    widths = [number for number in found if number is not None]
    assert all(least <= known <= most for least, known, most in zip(longest, widths, whole, strict=True))
    assert sum(widths) + 4 == min(width, sum(whole) + 4)
