"""Targets: their order, what is refused, and their weights, against a count of every token's characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.answer_templates import standard_template
from swift_stage2.channel_b.dialects import DIALECTS, OBJECT_LIST, Dialect
from swift_stage2.channel_b.targets import TokenGroup, order_ground_truth, weigh_tokens
from swift_stage2.errors import SampleError

WEIGHTS = {group: float(number) for number, group in enumerate(TokenGroup, start=1)}
PIECES = [
    ("1234", TokenGroup.STRUCTURE),  # weight 1
    ("56", TokenGroup.MATCHED_LABEL),  # 2
    ("7", TokenGroup.STRUCTURE),
    ("", TokenGroup.ANOTHER),
    ("89", TokenGroup.CLOSURE),  # 6
]


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_what_was_predicted_comes_first_in_that_order(predictions: list[int], truths: list[int]) -> None:
    pairs = sorted(zip(predictions, truths, strict=False))
    found = [truth for _, truth in pairs]
    assert order_ground_truth(pairs[::-1], 10) == (*found, *sorted(set(range(10)).difference(found)))


@pytest.mark.parametrize("pairs", [((0, 3),), ((0, 1), (1, 1)), ((0, -1),)])
def test_a_match_of_other_ground_truth_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="num_ground_truth=3"):
        order_ground_truth(pairs, 3)


@pytest.mark.parametrize(
    ("label", "box", "message"),
    [
        (" ", (1, 2, 3, 4), "label=' '"),
        ("a<|im_end|>", (1, 2, 3, 4), "im_end"),
        ("a", (3, 2, 1, 4), r"box=\(3, 2, 1, 4\)"),
        ("a", (-1, 2, 3, 4), r"box=\(-1, 2, 3, 4\)"),
        ("a", (1, 2, 3), r"box=\(1, 2, 3\)"),
        ("a", (1.5, 2, 3, 4), r"box=\(1.5, 2, 3, 4\)"),
    ],
)
def test_ground_truth_that_would_not_parse_is_refused(label: str, box: tuple[int, ...], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        standard_template(OBJECT_LIST).write([(label, box)])


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
    assert weigh_tokens([offset], PIECES, WEIGHTS) == (weight,)


def test_tokens_of_one_character_and_missing_weights() -> None:
    offsets = [(0, 4), (4, 6), (4, 6), (6, 9)]
    assert weigh_tokens(offsets, PIECES, {TokenGroup.MATCHED_LABEL: 0.5}) == (1.0, 0.5, 0.5, 1.0)


@given(st.sampled_from(list(DIALECTS.values())), st.lists(st.integers(0, 90), max_size=30))
def test_any_tokenisation_gives_one_weight_per_token(dialect: Dialect, cuts: list[int]) -> None:
    template = standard_template(dialect)
    box = (1, 2, 3, 4)[: dialect.num_coordinates]
    pieces = list(template.pieces([("a", box), ("b", box)], [True, False]))
    groups = [group for text, group in pieces for _ in text]
    offsets = list(pairwise(sorted({0, len(groups), *(cut for cut in cuts if cut < len(groups))})))
    for (start, end), weight in zip(offsets, weigh_tokens(offsets, pieces, WEIGHTS), strict=True):
        inside = groups[start:end]
        assert weight == WEIGHTS[max(inside, key=inside.count)]
