"""Answer templates: what json.dumps and fences write is learned and written again, byte for byte, or refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.answer_templates import (
    fill_placeholders,
    learn_template,
    standard_template,
    templates_of,
)
from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST, OBJECT_MAP, Dialect
from swift_stage2.channel_b.parsing import PredictedObject, parse_rollout
from swift_stage2.channel_b.targets import AnswerTemplate
from swift_stage2.errors import ConfigError, DatasetError

Object = tuple[str, tuple[int, ...]]
LIST, MAP = OBJECT_LIST, OBJECT_MAP
A: Object = ("a", (1, 2, 3, 4))
B: Object = ("b", (5, 6, 7, 8))
FENCED = '```json\n[\n  {"label": "a", "bbox_2d": [1, 2, 3, 4]},\n  {"label": "b", "bbox_2d": [5, 6, 7, 8]}\n]\n```'
MARK = re.compile(r'"(<\|coord_[0-9]+\|>)"')


@dataclass(frozen=True)
class Style:
    """A way to write answers that knows nothing of ``AnswerTemplate``: Python's own json does the work."""

    dialect: Dialect
    fence: str
    box_first: bool
    indent: int | str | None
    separators: tuple[str, str]
    ensure_ascii: bool
    coordinates: str  # integers, tokens or quoted
    one_per_line: bool
    first_number: int

    def write(self, objects: Sequence[Object]) -> str:
        """The answer."""
        items = [self._item(label, box) for label, box in shaped(objects, self.dialect)]
        numbered = {f"object_{number}": item for number, item in enumerate(items, start=self.first_number)}
        whole: Any = numbered if self.dialect is MAP else items
        if self.one_per_line and items:
            lines = [self._dump(item) for item in items]
            if self.dialect is MAP:
                lines = [
                    f'"{name}"{self.separators[1]}{line}' for name, line in zip(numbered, lines, strict=True)
                ]
            text = "[{"[self.dialect is MAP] + "\n" + ",\n".join(lines) + "\n" + "]}"[self.dialect is MAP]
        else:
            text = self._dump(whole)
        return f"{self.fence}\n{text}\n```" if self.fence else text

    def _item(self, label: str, box: Sequence[int]) -> dict[str, Any]:
        values: list[Any] = [n if self.coordinates == "integers" else f"<|coord_{n}|>" for n in box]
        place = "bbox_2d" if len(box) == 4 else "point_2d"
        members = {"desc" if self.dialect is MAP else "label": label, place: values}
        return dict(sorted(members.items(), key=lambda member: (member[0] == place) != self.box_first))

    def _dump(self, value: Any) -> str:
        indent = None if self.one_per_line else self.indent
        separators = (self.separators[0] if indent is None else ",", self.separators[1])
        text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=self.ensure_ascii)
        return MARK.sub(r"\1", text) if self.coordinates == "tokens" else text


def shaped(objects: Sequence[Object], dialect: Dialect) -> list[Object]:
    """Of a dialect of points their first corners."""
    return [(label, box[: dialect.num_coordinates]) for label, box in objects]


STYLES = st.builds(
    Style,
    dialect=st.sampled_from(list(DIALECTS.values())),
    fence=st.sampled_from(["", "```json", "```"]),
    box_first=st.booleans(),
    indent=st.sampled_from([None, None, 2, 4, "\t"]),
    separators=st.sampled_from([(", ", ": "), (",", ":"), (",", ": ")]),
    ensure_ascii=st.booleans(),
    coordinates=st.sampled_from(["integers", "tokens", "quoted"]),
    one_per_line=st.booleans(),
    first_number=st.integers(0, 1),
)
LABELS = (
    st.text(min_size=1, max_size=12)
    .map(str.strip)
    .filter(lambda label: bool(label) and "<|" not in label and "\ud7ff" not in label)
)
NUMBERS = st.integers(0, 1200)
BOXES = st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS).map(
    lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3]))
)
OBJECTS = st.lists(st.tuples(LABELS, BOXES), max_size=5)
WHOLE: list[Sequence[Object]] = [[A, ("é", (0, 0, 0, 0))], []]  # shows everything that a format has


@given(STYLES, st.lists(OBJECTS, min_size=1, max_size=4), OBJECTS)
def test_what_was_learned_is_written_again_and_read_back(
    style: Style, answers: list[list[Object]], other: list[Object]
) -> None:
    answers, other = [shaped(objects, style.dialect) for objects in answers], shaped(other, style.dialect)
    learned = learn_template([style.write(objects) for objects in answers], style.dialect)
    for objects in answers:
        text = style.write(objects)
        assert learned.write(objects) == text
        check_target(objects, learned, text)
    learned = learn_template([style.write(objects) for objects in (*WHOLE, *answers)], style.dialect)
    check_target(other, learned, style.write(other))  # also what it was not learned from


def check_target(objects: Sequence[Object], template: AnswerTemplate, text: str) -> None:
    """Labels and boxes are pieces of their own, and the parser reads the objects back."""
    pieces = list(template.pieces(objects, [number % 2 == 0 for number in range(len(objects))]))
    assert "".join(piece for piece, _ in pieces) == text
    spelled = Counter(piece for piece, group in pieces if "label" in group)
    assert spelled == Counter(
        json.dumps(label, ensure_ascii=template.ensure_ascii)[1:-1] for label, _ in objects
    )
    written = Counter(group for _, group in pieces if "coordinates" in group)
    assert [written["matched_coordinates"], written["missed_coordinates"]] == [
        (len(objects) + 1) // 2,
        len(objects) // 2,
    ]
    boxes = [piece for piece, group in pieces if "coordinates" in group]
    assert [[int(n) for n in re.findall("[0-9]+", box)] for box in boxes] == [list(box) for _, box in objects]
    assert pieces[-1][1] == "closure"
    parsed = parse_rollout(text, template.dialect)
    assert parsed.objects == tuple(PredictedObject(label, box) for label, box in objects)
    assert not parsed.dropped
    assert parsed.is_whole


@given(STYLES, st.permutations([[A], [B, A], [("é", (1, 1, 2, 2))], []]))
def test_the_order_of_the_answers_does_not_matter(style: Style, answers: list[list[Object]]) -> None:
    """Every rank learns from the same rows, and so does a run that resumes with another shuffle."""
    texts = [style.write(objects) for objects in answers]
    assert learn_template(texts, style.dialect) == learn_template(sorted(texts), style.dialect)


def test_weights_fall_on_what_they_are_for() -> None:
    joined: list[tuple[str, str]] = []
    for piece, group in learn_template([FENCED], LIST).pieces([A, B], [True, False]):
        before = joined.pop()[0] if joined and joined[-1][1] == group else ""
        joined.append((before + piece, group))
    assert joined == [
        ('```json\n[\n  {"label": "', "structure"),
        ("a", "matched_label"),
        ('", "bbox_2d": [', "structure"),
        ("1, 2, 3, 4", "matched_coordinates"),
        ("]", "structure"),
        ("},\n  ", "another"),
        ('{"label": "', "structure"),
        ("b", "missed_label"),
        ('", "bbox_2d": [', "structure"),
        ("5, 6, 7, 8", "missed_coordinates"),
        ("]", "structure"),
        ("}\n]\n```", "closure"),
    ]


@pytest.mark.parametrize("dialect", list(DIALECTS.values()))
def test_without_answers_a_dialect_has_its_standard(dialect: Dialect) -> None:
    assert learn_template([], dialect) == standard_template(dialect)
    assert standard_template(dialect).write([]) == dialect.opener + dialect.closer


def test_what_no_answer_shows_follows_from_the_rest() -> None:
    one = learn_template(['```json\n[\n  {"label": "a", "bbox_2d": [1, 2, 3, 4]}\n]\n```'], LIST)
    assert one.write([A, B]) == FENCED
    assert one.write([]) == "```json\n[]\n```"
    assert learn_template([FENCED, "[]"], LIST).write([]) == "[]", (
        "as the rows have it, whatever stands around others"
    )


@pytest.mark.parametrize("dialect", list(DIALECTS.values()))
def test_no_two_templates_write_the_same(dialect: Dialect) -> None:
    objects = shaped([A, ("é", (0, 0, 0, 0))], dialect)
    templates = templates_of(dialect)
    assert len({(template.write(objects), template.empty) for template in templates}) == len(templates)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I see nothing.",
        "Objects: [" + FENCED,
        FENCED + "\n",
        '[{"bbox_2d" : [1, 2, 3, 4], "label": "a"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "say "a""}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "a\nb"}]',
        '[{"bbox_2d": [1, 2,3, 4], "label": "a"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": " a"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "\\u0061"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "a"},]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "a"}',
        '[{"bbox_2d": <bbox>, "label": "a"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "a"}, {"label": "b", "bbox_2d": [1, 2, 3, 4]}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "a"},{"bbox_2d": [1, 2, 3, 4], "label": "a"}, '
        '{"bbox_2d": [1, 2, 3, 4], "label": "a"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "é"}, {"bbox_2d": [1, 2, 3, 4], "label": "\\u00e9"}]',
    ],
)
def test_what_cannot_be_written_again_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        learn_template([FENCED, text], LIST)
    message = str(caught.value)
    assert "stage2_ab.channel_b.target.dialect" in message
    assert repr(text[:20])[1:-1] in message
    assert "\n" not in message


def test_two_ways_of_writing_are_refused_with_both_texts() -> None:
    plain = standard_template(LIST).write([A, B])
    with pytest.raises(DatasetError) as caught:
        learn_template([FENCED, FENCED, plain], LIST)
    message = str(caught.value)
    assert repr(FENCED)[1:60] in message
    assert repr(plain)[1:60] in message
    assert message.index("which channel B would write") < message.index("```json"), (
        "the later one is the odd one"
    )
    assert "\n" not in message


def test_placeholders_are_filled_in_turn() -> None:
    text = '{"bbox_2d": <bbox>, "label": "<ref-object>"}, {"bbox_2d": <bbox>, "label": "<ref-object>"} <bbox>'
    assert fill_placeholders(text, [("a", (1.4, 2.6, 3, 4)), B]) == (
        '{"bbox_2d": [1, 3, 3, 4], "label": "a"}, {"bbox_2d": [5, 6, 7, 8], "label": "b"} <bbox>'
    )
