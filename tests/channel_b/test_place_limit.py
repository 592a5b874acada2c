"""How many POSTs a server gets at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.rollouts.requests import PostEnd
from swift_stage2.channel_b.rollouts.server_state import PlaceLimit


def test_the_limit_halves_when_there_is_no_room_and_grows_by_one_per_full_set() -> None:
    limit = PlaceLimit()
    assert limit.within(8) == 8
    limit.observe(PostEnd.BUSY, began_s=0.0, ended_s=1.0, most=8)
    assert limit.within(8) == 4
    limit.observe(PostEnd.TIMED_OUT, began_s=0.5, ended_s=2.0, most=8)
    assert limit.within(8) == 4, "it left before the cut"
    for _ in range(5):
        limit.observe(PostEnd.ANSWERED, began_s=2.0, ended_s=3.0, most=8)
    assert limit.within(8) == 5
    limit.observe(PostEnd.LOST, began_s=3.0, ended_s=4.0, most=8)
    assert limit.within(8) == 5, "trust, not room"


@given(
    ends=st.lists(st.sampled_from((PostEnd.ANSWERED, PostEnd.BUSY, PostEnd.TIMED_OUT, PostEnd.LOST))),
    most=st.integers(1, 64),
)
def test_the_limit_stays_between_one_and_the_share_and_comes_back(ends: list[PostEnd], most: int) -> None:
    limit = PlaceLimit()
    for second, end in enumerate(ends):
        limit.observe(end, began_s=second, ended_s=second + 1, most=most)
        assert 1 <= limit.within(most) <= most
    for _ in range(most * most + 2):
        limit.observe(PostEnd.ANSWERED, began_s=0.0, ended_s=0.0, most=most)
    assert limit.within(most) == most
