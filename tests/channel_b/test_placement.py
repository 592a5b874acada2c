"""Which server gets the next share, and how many POSTs a server gets at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.rollouts.placement import PlaceLimit, ServerPace, choose
from swift_stage2.channel_b.rollouts.requests import PostEnd


def servers(*paces: float | None) -> list[ServerPace]:
    return [ServerPace(pace, last_share=1) for pace in paces]


def fill(paces: list[ServerPace], num_shares: int, *, size: int = 1, rank: int = 0) -> list[int]:
    """In hand on each server once so many shares were placed and none has ended."""
    in_hand = [0] * len(paces)
    for share in range(num_shares):
        in_hand[choose(paces, in_hand, [size] * len(paces), share=2, turn=rank + share)] += size
    return in_hand


@given(
    num_shares=st.integers(1, 200),
    paces=st.lists(st.floats(0.1, 100.0), min_size=2, max_size=5),
    rank=st.integers(0, 9),
)
def test_a_faster_server_never_has_less_in_hand(num_shares: int, paces: list[float], rank: int) -> None:
    in_hand = fill(servers(*paces), num_shares, rank=rank)
    assert sum(in_hand) == num_shares
    for (_, less), (_, more) in pairwise(sorted(zip(paces, in_hand, strict=True))):
        assert more >= less - 1


@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    size=st.integers(1, 16),
    turn=st.integers(0, 50),
)
def test_of_equal_servers_the_least_loaded_is_first(counts: list[int], size: int, turn: int) -> None:
    paces = [ServerPace(3.0, 1)] * len(counts)
    assert counts[choose(paces, counts, [size] * len(counts), share=2, turn=turn)] == min(counts)


def test_servers_that_are_about_as_fast_as_the_best_share_evenly() -> None:
    assert fill(servers(10, 11, 14), 30) == [10, 10, 10]
    slow, fast = fill(servers(2, 10), 30)
    assert slow <= fast / 2


def test_a_server_without_history_counts_as_fast_as_the_fastest() -> None:
    assert fill(servers(10, None), 20) == [10, 10]
    assert choose(servers(1, 10, None), [0] * 3, [8] * 3, share=2, turn=2) == 2


def test_a_server_that_was_left_out_for_long_is_tried_again() -> None:
    slow = servers(100, 1)
    assert choose(slow, [0, 0], [1, 1], share=2, turn=1) == 0
    kept = [ServerPace(100, last_share=40), slow[1]]
    assert choose(kept, [0, 0], [1, 1], share=40, turn=1) == 1


def test_a_pace_follows_the_server_and_an_empty_share_shows_nothing() -> None:
    pace = ServerPace().after(10, 2.0)
    assert pace.prompts_per_s == 5.0
    assert pace.after(0, 3.0) == pace
    for _ in range(30):
        pace = pace.after(10, 1.0)
    assert pace.prompts_per_s == pytest.approx(10.0, rel=0.01)


# --- the limit -------------------------------------------------------------------------------------------


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
