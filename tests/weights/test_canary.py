"""When a server's greedy answer counts as the learner's: exactly, or up to a near tie in half precision."""

from __future__ import annotations

import pytest

from swift_stage2.weights.proof import HALF_PRECISION_TIE_NATS, CanaryAnswer

END = "<end>"
LIKELY = ({"1": -0.1, "7": -3.0}, {"2": -0.7, "3": -0.9, END: -1.0, "4": -2.0}, {"5": -0.01})


def agrees(*token_ids: int, tie_nats: float = HALF_PRECISION_TIE_NATS) -> bool:
    return CanaryAnswer((1, 2, 5), LIKELY, tie_nats).agrees(token_ids, str, END)


@pytest.mark.parametrize("tie_nats", [0.0, HALF_PRECISION_TIE_NATS])
def test_the_same_tokens_agree(tie_nats: float) -> None:
    assert agrees(1, 2, 5, tie_nats=tie_nats)


@pytest.mark.parametrize(
    ("theirs", "agreed"),
    [
        ((1, 3), True),  # tied with the learner's own 2; what follows is another text
        ((1, 3, 9, 9), True),
        ((1, 4, 5), False),  # 1.3 nats behind
        ((1, 9, 5), False),  # not even likely
        ((7, 2, 5), False),
        ((1,), True),  # the end of turn was tied
        ((1, 2), False),  # here it was not
        ((1, 2, 5, 6), False),  # the learner had ended
        ((), False),
    ],
)
def test_in_half_precision_a_near_tie_agrees_and_nothing_else(theirs: tuple[int, ...], agreed: bool) -> None:
    assert agrees(*theirs) == agreed
    assert not agrees(*theirs, tie_nats=0.0), "in float32 every token counts"


def test_before_the_first_answer_nothing_agrees() -> None:
    assert not CanaryAnswer().agrees((1,), str, END)
