"""When a server's greedy answer counts as the learner's."""

from __future__ import annotations

import pytest

from swift_stage2.weights.proof import CanaryAnswer

CLOSING = (90, 91)
TIES = (frozenset({1}), frozenset({2, 3, 90}), frozenset({5}))


def agrees(*token_ids: int, ties: tuple[frozenset[int], ...] = TIES) -> bool:
    return CanaryAnswer({}, {}, (1, 2, 5), CLOSING, ties).agrees(token_ids)


@pytest.mark.parametrize("shown", [(), (90,), (90, 91)])
@pytest.mark.parametrize("ties", [(), TIES])
def test_the_same_tokens_agree_however_much_of_the_end_of_turn_is_shown(
    shown: tuple[int, ...], ties: tuple[frozenset[int], ...]
) -> None:
    assert agrees(1, 2, 5, *shown, ties=ties)


@pytest.mark.parametrize(
    ("theirs", "agreed"),
    [
        ((1, 3), True),  # tied with the learner's own 2; what follows is another text
        ((1, 3, 9, 9), True),
        ((1, 4, 5), False),
        ((1, -1, 5), False),  # no tokenizer takes it
        ((7, 2, 5), False),
        ((1,), True),  # the end of turn was tied
        ((1, 2), False),  # here it was not
        ((1, 2, 5, 6), False),  # the learner had ended
        ((), False),
    ],
)
def test_where_there_are_near_ties_they_agree_and_nothing_else(theirs: tuple[int, ...], agreed: bool) -> None:
    assert agrees(*theirs) == agreed
    assert not agrees(*theirs, ties=()), "in float32 every token counts"
