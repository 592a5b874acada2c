"""When a canary is asked, and when a server's greedy answer counts as the learner's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.weights.proof import CanaryAnswer, CanarySchedule

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


# A version for some of three servers: True where checksums proved it, False where anything else happened; or a server
# that was lost between versions.
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
