"""Columns through segments and packs: whatever is packed with whatever, a value stays with its token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_model import Rows, make_encoder, rollout_of, sample_of

from swift_stage2.channel_b.encoding import Encoder, PromptEncoding
from swift_stage2.channel_b.packing import select_pack
from swift_stage2.channel_b.preprocessing import make_pack
from swift_stage2.columns import COLUMNS
from swift_stage2.records import MatchQuality, Sample, Segment, Target

CAPACITY = 600
MATCH = MatchQuality(0, 0, 0, 0.0, 0, 0)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder(packing_length=CAPACITY)


@pytest.fixture(scope="module")
def prompts(encoder: Encoder, rows: Rows) -> list[tuple[Sample, PromptEncoding]]:
    samples = [sample_of(row, number) for number, row in enumerate(rows[:3])]
    return [(sample, encoder.encode_prompt(sample)) for sample in samples]


@dataclass(frozen=True)
class Answer:
    """One target to be: which prompt it answers, its ids, which of them are supervised, what stands beside them."""

    prompt: int
    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    columns: Mapping[str, tuple[float, ...]]
    alternatives: tuple[tuple[int, int], ...]


# In float32 exactly; so is what a server sends.
VALUES = st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    tokens = draw(
        st.lists(st.tuples(st.integers(270, 400), st.sampled_from([0.0, 0.5, 1.0]), VALUES), max_size=40)
    )
    ids, weights, values = zip(*tokens, strict=True) if tokens else ((), (), ())
    columns = {"behaviour": values, "advantages": values}
    places = draw(st.sets(st.integers(0, len(ids) - 1))) if ids else ()
    alternatives = tuple((place, 401 + place) for place in sorted(places))
    missing = draw(st.sets(st.sampled_from(sorted(columns))))
    kept = {name: value for name, value in columns.items() if name not in missing}
    return Answer(draw(st.integers(0, 2)), ids, weights, kept, alternatives)


def segment_of(answer: Answer, prompts: Sequence[tuple[Sample, PromptEncoding]], encoder: Encoder) -> Segment:
    sample, prompt = prompts[answer.prompt]
    rollout = rollout_of(sample, "", prompt.token_ids)
    target = Target(
        "", answer.token_ids, answer.weights, MATCH, columns=answer.columns, alternatives=answer.alternatives
    )
    return encoder.encode_segment(rollout, prompt, [(target, 1.0)])


@given(drawn=st.lists(answers(), min_size=1, max_size=7))
def test_every_value_stays_with_its_token(
    encoder: Encoder, prompts: list[tuple[Sample, PromptEncoding]], drawn: list[Answer]
) -> None:
    segments = [segment_of(answer, prompts, encoder) for answer in drawn]
    chosen = select_pack([segment.num_tokens for segment in segments], CAPACITY)
    batch = make_pack("p", [segments[index] for index in chosen], encoder).batch
    packed = [drawn[index] for index in chosen]
    present = {name for answer in packed for name in answer.columns}
    assert present == COLUMNS.keys() & batch.keys()
    labels, tokens = batch["labels"][0].tolist(), batch["input_ids"][0].tolist()
    end, alternatives = 0, []
    for number, answer in enumerate(packed):
        segment = segments[chosen[number]]
        start, end = end, end + segment.num_tokens
        begin = start + len(prompts[answer.prompt][1].token_ids)
        behind = begin + len(answer.token_ids)
        alternatives += [[begin + at, token] for at, token in answer.alternatives if answer.weights[at]]
        assert tokens[begin:behind] == list(answer.token_ids)
        expected = [t if w else -100 for t, w in zip(answer.token_ids, answer.weights, strict=True)]
        assert labels[begin:behind] == expected
        for name in present:
            filler = COLUMNS[name].filler
            values = answer.columns.get(name, [filler] * len(expected))
            around = [filler] * (begin - start), [filler] * (end - behind)
            wanted = torch.tensor([*around[0], *values, *around[1]])
            torch.testing.assert_close(batch[name][0, start:end], wanted, rtol=0, atol=0, equal_nan=True)
    assert end == len(labels)
    assert (batch["alternatives"].tolist() if "alternatives" in batch else []) == alternatives
    assert all(batch[name].shape == (1, end) for name in present)
