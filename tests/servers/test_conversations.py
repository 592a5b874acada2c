"""Conversations of several turns on the wire: ms-swift's lists become one answer with its places, or are refused."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.errors import ProtocolError
from swift_stage2.servers.infer_wire import output_json, parse_infer_reply

HEADER = (900, 901, 902)  # of an answer, as no text and no user's message has it
USER, END = (900, 910, 902), 903
words = st.lists(st.integers(1, 3), max_size=3).map(tuple)  # so few that texts quote each other


@dataclass(frozen=True)
class Talk:
    """A conversation, and what of it is to be found."""

    prompt: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    said: tuple[tuple[int, ...], ...]
    """By the environment, before each turn but the first."""

    @property
    def answer(self) -> list[tuple[int, bool]]:
        """All behind the prompt, and whether the model sampled it."""
        found = list(zip(self.turns[0], map(bool, self.masks[0]), strict=True))
        for said, turn, mask in zip(self.said, self.turns[1:], self.masks[1:], strict=True):
            found += [(token, False) for token in said] + list(zip(turn, map(bool, mask), strict=True))
        return found

    @property
    def log_probs(self) -> list[list[float]]:
        return [
            [-token / 8 - number for token, one in zip(turn, mask, strict=True) if one]
            for number, (turn, mask) in enumerate(zip(self.turns, self.masks, strict=True))
        ]

    def record(self) -> dict[str, Any]:
        """As ms-swift's server says it."""
        before = [token for token, _ in self.answer][: len(self.answer) - len(self.turns[-1])]
        choice = {
            "message": {"content": "last"},
            "finish_reason": "stop",
            "token_ids": self.turns[-1],
            "logprobs": {"content": [{"logprob": -1.0}] * len(self.turns[-1])},
        }
        record = {
            "response": {"choices": [choice], "prompt_token_ids": [*self.prompt, *before]},
            "messages": [{"role": "assistant", "content": [1, 2]}],
            "response_token_ids": self.turns,
            "response_loss_mask": self.masks,
            "rollout_logprobs": self.log_probs,
            "rollout_infos": {"num_turns": len(self.turns)},
        }
        return dict(json.loads(json.dumps(record)))


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    prompt: tuple[int, ...] = ()
    for _ in range(draw(st.integers(0, 2))):  # what was said before, answers included
        prompt += (*USER, *draw(words), END, *HEADER, *draw(words), END)
    prompt += (*USER, *draw(words), END, *HEADER)
    num = draw(st.integers(1, 4))
    # One that was cut off has no end; one of nothing but its end is like the end of every message.
    turns = tuple(draw(words) + draw(st.sampled_from([(END,), (1,)])) for _ in range(num))
    masks = tuple(tuple(draw(st.integers(0, 1)) for _ in turn) for turn in turns)
    masks = (*masks[:-1], (*masks[-1][:-1], 1))
    said = tuple((*USER, *draw(words), END, *HEADER) for _ in range(num - 1))
    return Talk(prompt, turns, masks, said)


@given(talk=talks())
def test_all_turns_are_one_answer_behind_the_first_prompt(talk: Talk) -> None:
    (found,) = parse_infer_reply([talk.record()], 1, {"log_probs"})
    assert found.prompt_token_ids == talk.prompt
    assert found.token_ids == tuple(token for token, _ in talk.answer)
    sampled = [place for place, (_, is_sampled) in enumerate(talk.answer) if is_sampled]
    places = [place for start, end in found.turns for place in range(start, end)]
    assert (places or list(range(len(found.token_ids)))) == sampled
    assert all(end < start for (_, end), (start, _) in zip(found.turns, found.turns[1:], strict=False))
    values = dict(zip(sampled, chain.from_iterable(talk.log_probs), strict=True))
    assert found.log_probs == tuple(values.get(place, 0.0) for place in range(len(talk.answer)))
    assert found.text == "last"
    # Our server's record of it says the same.
    record = output_json(found, request_id=None, model="m", return_details=True)
    assert parse_infer_reply(json.loads(json.dumps([record])), 1, {"log_probs"}) == (found,)


TALK = Talk(
    (*USER, 1, END, *HEADER), ((1, 2, END), (2, END)), ((1, 1, 1), (1, 1)), ((*USER, 3, END, *HEADER),)
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_token_ids": [[7, 2, END], [2, END]]}, "stand in its conversation, .* turn 1 of 2, of 3"),
        (
            {"response_token_ids": [[1, 2, END], [3, END]]},
            "a conversation of 21 tokens must end with its last",
        ),
        ({"response_token_ids": [[1, 2], [2, END]]}, "num_tokens=4 num_masks=2 num_values=5"),
        ({"response_token_ids": [[-1, 2, END], [2, END]]}, "numbers of a vocabulary"),
        ({"response_loss_mask": [[1, 1, 1]]}, "num_turns=2 num_tokens=5 num_masks=1 num_values=3"),
        ({"response_loss_mask": [[1, 1, 2], [1, 1]]}, "response_loss_mask.*got 2"),
        ({"response_loss_mask": [[0, 0, 0], [0, 0]]}, "must have sampled something, got num_masked=13"),
        ({"rollout_logprobs": [[-1.0], [-1.0, -1.0]]}, "got num_values=3 num_tokens=5"),
        ({"rollout_logprobs": []}, "got num_values=0 num_tokens=5"),
        ({"rollout_logprobs": [[1.0] * 3, [-1.0] * 2]}, "rollout_logprobs"),
        ({"rollout_infos": {"images": ["aGk="]}}, "must bring text alone, got images"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_its_numbers(
    change: dict[str, Any], words: str
) -> None:
    parse_infer_reply([TALK.record()], 1, {"log_probs"})
    with pytest.raises(ProtocolError, match=words) as refused:
        parse_infer_reply([TALK.record() | change], 1, {"log_probs"})
    assert "\n" not in str(refused.value)


def test_a_list_of_outputs_is_refused_and_one_turn_is_as_before() -> None:
    record = TALK.record()
    with pytest.raises(ProtocolError, match=r"num_outputs=2 num_requests=1; a scheduler .* not a list"):
        parse_infer_reply([record, record], 1)
    alone = copy.deepcopy(record) | {"response_token_ids": [], "response_loss_mask": [], "turns": [[0, 1]]}
    (found,) = parse_infer_reply([alone], 1)
    assert (found.turns, found.token_ids, found.first_turn) == ((), TALK.turns[-1], TALK.turns[-1])
    assert parse_infer_reply([record], 1)[0].first_turn == TALK.turns[0]
