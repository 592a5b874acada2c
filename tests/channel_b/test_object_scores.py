"""Which tokens spell an object, against offsets that tokenizer or bytes tell; and what they make of a score."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_model import make_encoder

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.object_scores import ObjectLogProbs, ScoreWay, object_log_probs, token_spans
from swift_stage2.channel_b.parsing import parse_rollout

ANSWERS = st.lists(st.text('aé中😀\u0301 ,:<|"\\[]0123', min_size=1, max_size=8), min_size=1, max_size=3).map(
    lambda labels: json.dumps(
        [{"bbox_2d": [1, 23, 456, 999], "label": label} for label in labels], ensure_ascii=False
    )
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


def cut(text: Sequence[int] | str, places: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(sorted({0, len(text), *(place % len(text) for place in places)})))


@given(ANSWERS, st.lists(st.integers(0, 1000), max_size=20))
def test_spans_are_the_tokenizers_offsets_however_the_model_cut_its_text(
    encoder: Encoder, text: str, places: list[int]
) -> None:
    text = encoder.normalise(text)
    ids, expected = list[int](), list[tuple[int, int]]()
    for begin, end in cut(text, places):
        found, offsets = encoder.tokenise(text[begin:end])
        ids += found
        expected += [(begin + start, begin + stop) for start, stop in offsets]
    assert token_spans([*ids, *encoder.closing_token_ids], encoder.decode)[: len(ids)] == expected


@given(ANSWERS, st.lists(st.integers(0, 1000), max_size=40))
def test_tokens_that_share_a_character_have_it_each(text: str, places: list[int]) -> None:
    """A token is any run of bytes here."""
    whole = text.encode()
    tokens = cut(whole, places)
    ends = list(accumulate(len(each.encode()) for each in text))
    characters = list(zip([0, *ends], ends, strict=False))

    def decode(numbers: Sequence[int]) -> str:
        return b"".join(whole[slice(*tokens[number])] for number in numbers).decode(errors="replace")

    for (begin, end), span in zip(tokens, token_spans(range(len(tokens)), decode), strict=True):
        touched = [place for place, (start, stop) in enumerate(characters) if start < end and begin < stop]
        assert span == (touched[0], touched[-1] + 1)


def test_an_answer_whose_tokens_are_parts_of_characters_is_spelt_a_few_tokens_at_a_time() -> None:
    whole, sizes = ("😀" * 500).encode(), list[int]()

    def decode(numbers: Sequence[int]) -> str:
        sizes.append(len(numbers))
        return b"".join(whole[2 * number : 2 * number + 2] for number in numbers).decode(errors="replace")

    spans = token_spans(range(1000), decode)
    assert spans == [(number // 2, number // 2 + 1) for number in range(1000)]
    assert max(sizes) < 20


def test_an_object_has_the_tokens_of_its_label_and_of_its_coordinates() -> None:
    pieces = ['[{"bbox_2d": [', "1", "0, ", "2", ", 30, 4", "0", '], "label": "ca', "r", '"}]', "<|im_end|>"]
    values = [-float(number) for number in range(len(pieces))]

    def decode(numbers: Sequence[int]) -> str:
        return "".join(pieces[number] for number in numbers)

    text = "".join(pieces[:-1])
    said, ids = [each.places for each in parse_rollout(text).counted], range(len(pieces))
    found = object_log_probs(said, text, ids, values, decode)
    assert found == (ObjectLogProbs((-6.0, -7.0), (-1.0, -2.0, -3.0, -4.0, -5.0)),)
    scores = {str(way): -math.log(found[0].score(way)) for way in ScoreWay}
    assert scores == pytest.approx(
        {
            "label_mean": 6.5,
            "label_product": 13,
            "box_mean": 3,
            "box_product": 15,
            "both_mean": 4,
            "both_product": 28,
        }
    )
    for bad in ((text, ids, None), (text, ids, values[1:]), (text + "x", ids, values)):
        assert object_log_probs(said, *bad, decode) is None
    assert object_log_probs((), text, ids, values, decode) == ()
