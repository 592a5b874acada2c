"""Who gets how much of a batch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.rollout_client.plan import ServerLoad, ServerPace, as_slices, place

PACES = st.one_of(st.none(), st.floats(0.01, 1000.0))
SERVERS = st.lists(
    st.builds(lambda pace, busy: ServerLoad(ServerPace(pace, last_batch=1), busy), PACES, st.integers(0, 50)),
    min_size=1,
    max_size=6,
)


def servers(*paces: float | None) -> list[ServerLoad]:
    return [ServerLoad(ServerPace(pace, last_batch=1)) for pace in paces]


@given(num_samples=st.integers(0, 200), loads=SERVERS, full=st.integers(1, 64), turn=st.integers(0, 50))
def test_every_sample_is_placed_on_as_few_servers_as_hold_the_batch(
    num_samples: int, loads: list[ServerLoad], full: int, turn: int
) -> None:
    sizes = place(num_samples, loads, full_share=full, turn=turn, batch=2)
    assert len(sizes) == len(loads)
    assert sum(sizes) == num_samples
    assert min(sizes) >= 0
    assert sum(size > 0 for size in sizes) == min(len(loads), math.ceil(num_samples / full))


@given(
    num_samples=st.integers(1, 200),
    paces=st.lists(st.floats(0.1, 100.0), min_size=2, max_size=5),
    turn=st.integers(0, 9),
)
def test_a_faster_server_never_gets_less(num_samples: int, paces: list[float], turn: int) -> None:
    sizes = place(num_samples, servers(*paces), full_share=1, turn=turn, batch=2)
    by_pace = sorted(zip(paces, sizes, strict=True))
    if num_samples >= len(paces):
        for (slow, less), (fast, more) in pairwise(by_pace):
            assert more >= less - (1 if slow == fast else 0)


@given(rate=st.floats(1.0, 8.0), first=st.integers(1, 63))
def test_shares_settle_near_the_proportion_of_two_linear_servers(rate: float, first: int) -> None:
    """Server 1 computes ``rate`` prompts in the time of one on server 0; from any first split."""
    paces = [
        ServerPace().after(first, float(first), 1),
        ServerPace().after(64 - first, (64 - first) / rate, 1),
    ]
    sizes = place(64, [ServerLoad(pace) for pace in paces], full_share=1, turn=0, batch=2)
    ends = sizes[0] / 1.0, sizes[1] / rate
    ideal = 64 / (1 + rate)
    assert max(ends) <= 1.3 * ideal + 1


@given(first=st.integers(12, 52))
def test_shares_of_servers_whose_time_does_not_depend_on_the_share_come_back_to_even(first: int) -> None:
    """A larger batch looks faster there; nothing may be fed by that."""
    sizes = (first, 64 - first)
    paces = [ServerPace(), ServerPace()]
    for batch in range(1, 60):
        paces = [pace.after(size, 1.0, batch) for pace, size in zip(paces, sizes, strict=True)]
        sizes = place(64, [ServerLoad(pace) for pace in paces], full_share=1, turn=0, batch=batch + 1)  # type: ignore[assignment]
    assert abs(sizes[0] - 32) <= 6


@given(loads=SERVERS, turn=st.integers(0, 5))
def test_a_small_batch_goes_to_one_server_that_is_about_the_first_to_end(
    loads: list[ServerLoad], turn: int
) -> None:
    sizes = place(8, loads, full_share=8, turn=turn, batch=2)
    fastest = max((load.pace.prompts_per_s for load in loads if load.pace.prompts_per_s), default=1.0)
    ends = [(load.in_flight + 8) / (load.pace.prompts_per_s or fastest) for load in loads]
    assert ends[sizes.index(8)] <= 1.5 * min(ends)


def test_ranks_with_equal_servers_take_turns() -> None:
    chosen = [place(8, servers(10, 11, 10.5), full_share=8, turn=turn, batch=2).index(8) for turn in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_server_without_history_counts_as_fast_as_the_fastest() -> None:
    assert place(20, servers(10, None), full_share=1, turn=0, batch=2) == (10, 10)
    assert place(8, servers(1, 10, None), full_share=8, turn=2, batch=2) == (0, 0, 8)


def test_what_is_still_in_flight_counts_as_work() -> None:
    loads = [ServerLoad(ServerPace(10, 1), in_flight=10), ServerLoad(ServerPace(10, 1))]
    sizes = place(20, loads, full_share=1, turn=0, batch=2)
    assert sizes == (5, 15)
    assert place(8, loads, full_share=8, turn=0, batch=2) == (0, 8)


def test_a_server_that_was_left_out_for_long_is_tried_again() -> None:
    slow = servers(100, 1)
    assert place(8, slow, full_share=8, turn=1, batch=2) == (8, 0)
    kept = [ServerLoad(ServerPace(100, last_batch=40)), slow[1]]
    assert place(8, kept, full_share=8, turn=1, batch=40) == (0, 8)


def test_a_pace_follows_the_server_and_an_empty_share_shows_nothing() -> None:
    pace = ServerPace().after(10, 2.0, batch=1)
    assert pace.prompts_per_s == 5.0
    assert pace.after(0, 3.0, batch=2) == ServerPace(5.0, 2)
    for batch in range(3, 30):
        pace = pace.after(10, 1.0, batch)
    assert pace.prompts_per_s == pytest.approx(10.0, rel=0.01)


def test_slices_cover_the_batch_in_order() -> None:
    assert as_slices((2, 0, 3)) == [slice(0, 2), slice(2, 2), slice(2, 5)]


@pytest.mark.parametrize(
    ("num_samples", "loads", "full"), [(1, [], 1), (-1, servers(1), 1), (1, servers(1), 0)]
)
def test_what_makes_no_sense_is_refused(num_samples: int, loads: list[ServerLoad], full: int) -> None:
    with pytest.raises(ValueError, match="got"):
        place(num_samples, loads, full_share=full, turn=0, batch=1)
