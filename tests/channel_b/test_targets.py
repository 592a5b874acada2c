"""Targets: order, text, spans and weights, with the parser as the reader of what is written."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST, Dialect
from swift_stage2.channel_b.parsing import PredictedObject, parse_rollout
from swift_stage2.channel_b.targets import (
    TargetText,
    TextSpan,
    TokenGroup,
    order_ground_truth,
    render_target,
    weigh_tokens,
)
from swift_stage2.errors import SampleError

Object = tuple[str, tuple[int, int, int, int]]
A: Object = ("a", (1, 2, 3, 4))
B: Object = ("b", (5, 6, 7, 8))
LIST_AB = '[{"bbox_2d": [1, 2, 3, 4], "label": "a"}, {"bbox_2d": [5, 6, 7, 8], "label": "b"}]'
MAP_AB = (
    '{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}, "object_2": {"desc": "b", "bbox_2d": [5, 6, 7, 8]}}'
)


@pytest.mark.parametrize(
    ("pairs", "num_ground_truth", "expected"),
    [
        (((0, 2), (2, 0)), 3, (2, 0, 1)),
        ((), 3, (0, 1, 2)),
        ((), 0, ()),
        (((1, 3), (4, 1)), 5, (3, 1, 0, 2, 4)),
        (((0, 0), (1, 1)), 2, (0, 1)),
    ],
)
def test_order(pairs: tuple[tuple[int, int], ...], num_ground_truth: int, expected: tuple[int, ...]) -> None:
    assert order_ground_truth(pairs, num_ground_truth) == expected


@pytest.mark.parametrize("pairs", [((0, 3),), ((0, 1), (1, 1)), ((0, -1),)])
def test_a_match_of_other_ground_truth_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="num_ground_truth=3"):
        order_ground_truth(pairs, 3)


@pytest.mark.parametrize(
    ("dialect", "objects", "text"),
    [
        ("object_list", [A, B], LIST_AB),
        ("object_map", [A, B], MAP_AB),
        ("object_list", [A], LIST_AB[:40] + "]"),
        ("object_list", [], "[]"),
        ("object_map", [], "{}"),
        ("object_list", [('say "é"\n', (0, 0, 0, 0))], r'[{"bbox_2d": [0, 0, 0, 0], "label": "say \"é\""}]'),
    ],
)
def test_text(dialect: str, objects: list[Object], text: str) -> None:
    assert render_target(objects, [True] * len(objects), standard_template(DIALECTS[dialect])).text == text


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (
            "object_list",
            [
                ('[{"bbox_2d": [', "structure"),
                ("1, 2, 3, 4", "matched_coordinates"),
                ('], "label": "', "structure"),
                ("a", "matched_label"),
                ('"', "structure"),
                ("}, ", "another"),
                ('{"bbox_2d": [', "structure"),
                ("5, 6, 7, 8", "missed_coordinates"),
                ('], "label": "', "structure"),
                ("b", "missed_label"),
                ('"', "structure"),
                ("}]", "closure"),
            ],
        ),
        (
            "object_map",
            [
                ('{"object_1": {"desc": "', "structure"),
                ("a", "matched_label"),
                ('", "bbox_2d": [', "structure"),
                ("1, 2, 3, 4", "matched_coordinates"),
                ("]", "structure"),
                ("}, ", "another"),
                ('"object_2": {"desc": "', "structure"),
                ("b", "missed_label"),
                ('", "bbox_2d": [', "structure"),
                ("5, 6, 7, 8", "missed_coordinates"),
                ("]", "structure"),
                ("}}", "closure"),
            ],
        ),
    ],
)
def test_spans(dialect: str, expected: list[tuple[str, str]]) -> None:
    target = render_target([A, B], [True, False], standard_template(DIALECTS[dialect]))
    assert [(target.text[span.start : span.end], span.group) for span in target.spans] == expected


LABELS = st.text(min_size=1).filter(lambda label: bool(label.strip()) and "<|im_end|>" not in label)
COORDINATES = st.tuples(*[st.integers(0, 1000)] * 4)
BOXES = COORDINATES.map(lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])))


@given(
    st.lists(st.tuples(LABELS, BOXES, st.booleans()), max_size=6), st.sampled_from(list(DIALECTS.values()))
)
def test_the_parser_reads_back_what_is_written(
    rows: list[tuple[str, tuple[int, ...], bool]], dialect: Dialect
) -> None:
    rows = [(label, box[: dialect.num_coordinates], matched) for label, box, matched in rows]
    target = render_target(
        [(label, box) for label, box, _ in rows],
        [matched for _, _, matched in rows],
        standard_template(dialect),
    )
    json.loads(target.text)
    parsed = parse_rollout(target.text, dialect)
    assert parsed.objects == tuple(PredictedObject(label.strip(), box) for label, box, _ in rows)
    assert not parsed.dropped
    assert not parsed.unclosed
    check_partition(target)
    for matched in (True, False):
        count = sum(1 for row in rows if row[2] is matched)
        wanted = TokenGroup.MATCHED_COORDINATES if matched else TokenGroup.MISSED_COORDINATES
        assert sum(span.group == wanted for span in target.spans) == count


def check_partition(target: TargetText) -> None:
    assert target.spans[0].start == 0
    assert target.spans[-1].end == len(target.text)
    assert all(span.start < span.end for span in target.spans)
    for left, right in pairwise(target.spans):
        assert left.end == right.start
        assert left.group != right.group


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((" ", (1, 2, 3, 4)), "label=' '"),
        (("a<|im_end|>", (1, 2, 3, 4)), "im_end"),
        (("a", (3, 2, 1, 4)), r"box=\(3, 2, 1, 4\)"),
        (("a", (-1, 2, 3, 4)), r"box=\(-1, 2, 3, 4\)"),
        (("a", (1, 2, 3)), r"box=\(1, 2, 3\)"),
        (("a", (1.5, 2, 3, 4)), r"box=\(1.5, 2, 3, 4\)"),
    ],
)
def test_ground_truth_that_would_not_parse_is_refused(row: Object, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        render_target([row], [True], standard_template(OBJECT_LIST))


def test_one_flag_per_object() -> None:
    with pytest.raises(ValueError, match="num_objects=2 num_flags=1"):
        render_target([A, B], [True], standard_template(OBJECT_LIST))


WEIGHTS = {group: float(number) for number, group in enumerate(TokenGroup, start=1)}
SPANS = (
    TextSpan(0, 4, TokenGroup.STRUCTURE),  # weight 1
    TextSpan(4, 6, TokenGroup.MATCHED_LABEL),  # 2
    TextSpan(6, 7, TokenGroup.STRUCTURE),
    TextSpan(7, 9, TokenGroup.CLOSURE),  # 6
)


@pytest.mark.parametrize(
    ("offset", "weight"),
    [
        ((0, 4), 1),
        ((4, 6), 2),
        ((3, 6), 2),  # most characters
        ((3, 5), 1),  # a tie: the first
        ((5, 7), 2),  # a tie: the first
        ((3, 7), 1),  # two of structure, in two places, and two of the label: a tie again
        ((6, 9), 6),
        ((0, 9), 1),
        ((4, 4), 2),  # no character: the group at its place
        ((7, 7), 6),
        ((9, 9), 6),  # at the end of the text
    ],
)
def test_a_token_weighs_what_most_of_its_characters_weigh(offset: tuple[int, int], weight: float) -> None:
    assert weigh_tokens([offset], SPANS, WEIGHTS) == (weight,)


def test_tokens_of_one_character_and_missing_weights() -> None:
    offsets = [(0, 4), (4, 6), (4, 6), (6, 9)]
    assert weigh_tokens(offsets, SPANS, {TokenGroup.MATCHED_LABEL: 0.5}) == (1.0, 0.5, 0.5, 1.0)
    assert weigh_tokens([], SPANS, {}) == ()


@pytest.mark.parametrize("offset", [(8, 10), (-1, 2), (3, 2)])
def test_tokens_outside_the_text_are_refused(offset: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="num_characters=9"):
        weigh_tokens([offset], SPANS, WEIGHTS)


@given(st.data())
def test_any_tokenisation_gives_one_weight_per_token(data: st.DataObject) -> None:
    dialect = data.draw(st.sampled_from(list(DIALECTS.values())))
    objects = [(label, box[: dialect.num_coordinates]) for label, box in (A, B)]
    target = render_target(objects, [True, False], standard_template(dialect))
    size = len(target.text)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=30))})
    offsets = list(pairwise(cuts))
    groups = [next(s.group for s in target.spans if s.start <= place < s.end) for place in range(size)]
    weights = weigh_tokens(offsets, target.spans, WEIGHTS)
    for (start, end), weight in zip(offsets, weights, strict=True):
        inside = groups[start:end]
        assert weight == WEIGHTS[max(inside, key=inside.count)]
