"""When a canary is asked, and when a server's greedy answer counts as the learner's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.weights.proof import HALF_PRECISION_TIE_NATS, CanaryAnswer, CanarySchedule

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


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**63 - 1])
def test_an_id_that_no_tokenizer_takes_is_another_token(token_id: int) -> None:
    def text_of(token_id: int) -> str:
        raise OverflowError("number too large to fit in target type")

    answer = CanaryAnswer((1, 2, 5), LIKELY, HALF_PRECISION_TIE_NATS)
    assert not answer.agrees((1, token_id, 5), text_of, END)


# A round with some of three servers: True where checksums proved it, False where anything else happened; or a server
# that was lost between rounds.
EVENTS = st.lists(
    st.one_of(st.dictionaries(st.integers(0, 2), st.booleans(), min_size=1), st.integers(0, 2)), max_size=40
)


@given(st.integers(1, 6), EVENTS)
def test_a_canary_is_due_unless_each_server_was_asked_one_not_long_ago_and_has_proven_itself_since(
    every_rounds: int, events: list[dict[int, bool] | int]
) -> None:
    schedule = CanarySchedule(every_rounds)
    histories: dict[int, list[str]] = {server: [] for server in range(3)}
    for event in events:
        if isinstance(event, int):
            schedule.forget(event)
            histories[event].append("lost")
            continue
        recent = [histories[server][-(every_rounds - 1) :] if every_rounds > 1 else [] for server in event]
        excused = all("asked" in past[_last_fault(past) :] for past in recent)
        asked = schedule.is_due(event)
        assert asked != excused
        for server, by_checksums in event.items():
            schedule.record(server, asked=asked, by_checksums=by_checksums)
            histories[server].append("fault" if not by_checksums else "asked" if asked else "proven")


def _last_fault(past: list[str]) -> int:
    return max((index + 1 for index, what in enumerate(past) if what in ("lost", "fault")), default=0)
