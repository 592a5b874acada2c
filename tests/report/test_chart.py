"""Charts as SVG: everything drawn lies inside the axes, whatever the numbers are, and nothing in a text is obeyed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.pages.content import Chart, Mark, Series, series_of
from swift_stage2.pages.page import svg_of

VALUES = st.floats(-1e9, 1e9, allow_subnormal=False)
POINTS = st.lists(st.tuples(st.integers(0, 10**6), VALUES), max_size=5)


def chart(series: tuple[Series, ...], **others: object) -> Chart:
    values = {"key": "k", "title": "t", "description": "d", "y_title": "y", "series": series}
    return Chart(**(values | others))  # type: ignore[arg-type]


@given(st.sampled_from(Mark), POINTS, st.dictionaries(st.just("limit"), VALUES))
def test_all_that_is_drawn_lies_inside_the_axes(
    mark: Mark, points: list[tuple[int, float]], limits: dict[str, float]
) -> None:
    root = ET.fromstring(svg_of(chart(series_of(mark, {"a": sorted(points)}), limits=limits)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    circles = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter("circle")]
    lines = [
        (float(each.attrib[f"x{end}"]), float(each.attrib[f"y{end}"]))
        for each in root.iter("line")
        for end in (1, 2)
    ]
    numbers = [float(n) for each in root.iter("path") for n in re.findall(r"[-\d.]+", each.attrib["d"])]
    assert len(circles) == (0 if mark is Mark.STAIRS else len(points))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in (*circles, *lines))
    assert all(0 <= number <= width for number in numbers)


def test_ticks_are_round_numbers_around_the_values() -> None:
    root = ET.fromstring(svg_of(chart(series_of(Mark.LINE, {"a": [(3, 0.2), (97, 0.71)]}))))
    texts = [each.text for each in root.iter("text")]
    assert texts[:9] == ["0", "0.2", "0.4", "0.6", "0.8", "0", "20", "40", "60"]


def test_a_higher_value_stands_higher_and_a_later_one_further_right() -> None:
    root = ET.fromstring(svg_of(chart(series_of(Mark.POINTS, {"a": [(0, 1.0), (5, 3.0)]}))))
    first, second = ((float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle"))
    assert first[0] < second[0]
    assert first[1] > second[1]


def test_a_text_stays_text() -> None:
    series = Series("a", Mark.POINTS, (1.0,), (2.0,))
    text = svg_of(chart((series,), title="<script>", y_title="<b>", limits={"<i>": 1.0}))
    assert not re.search(r"<(script|b|i)>", text)
    assert ET.fromstring(text).find(".//{*}circle") is not None
