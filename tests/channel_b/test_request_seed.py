from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.rollouts.seeds import SeedLedger, request_seed
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.records import SampleKey

LARGEST = 2**31 - 1
FIRST = {"run_seed": 7, "rank": 0, "world_size": 2, "epoch": 0, "position": 0, "attempt": 0, "draw": 0}

counts = st.integers(min_value=0, max_value=10**12)


def seeds_of_rank(rank: int, world_size: int, num_positions: int) -> list[int]:
    place = FIRST | {"rank": rank, "world_size": world_size}
    return [request_seed(**place | {"position": position}) for position in range(num_positions)]


def test_two_ranks_have_no_common_seed_and_none_is_zero() -> None:
    first, second = (set(seeds_of_rank(rank, 2, 20_000)) for rank in (0, 1))
    assert len(first) == len(second) == 20_000
    assert not first & second
    assert 0 not in first | second


@given(
    world_size=st.integers(min_value=1, max_value=1024),
    data=st.data(),
    run_seed=st.integers(),
    epoch=counts,
    position=counts,
    attempt=st.integers(min_value=0, max_value=100),
    draw=st.integers(min_value=0, max_value=10_000),
)
def test_every_seed_of_a_post_lies_in_its_ranks_own_interval(
    world_size: int, data: st.DataObject, run_seed: int, epoch: int, position: int, attempt: int, draw: int
) -> None:
    rank = data.draw(st.integers(min_value=0, max_value=world_size - 1))
    seed = request_seed(
        run_seed=run_seed,
        rank=rank,
        world_size=world_size,
        epoch=epoch,
        position=position,
        attempt=attempt,
        draw=draw,
    )
    width = LARGEST // world_size
    last = seed + MAX_REQUESTS_PER_POST - 1  # an engine adds the request's number to the seed
    assert 1 + rank * width <= seed
    assert last <= (rank + 1) * width <= LARGEST


@pytest.mark.parametrize("world_size", [1, 8, 64])
def test_within_a_rank_no_position_attempt_or_redraw_repeats_a_seed(world_size: int) -> None:
    seeds = [
        request_seed(
            **FIRST | {"world_size": world_size, "position": position, "attempt": attempt, "draw": draw}
        )
        for position in range(2_000)
        for attempt in range(3)
        for draw in range(3)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", ["run_seed", "epoch", "position", "attempt", "draw", "rank"])
def test_each_part_of_the_place_changes_the_seed(name: str) -> None:
    assert request_seed(**FIRST) == request_seed(**FIRST)
    assert request_seed(**FIRST | {name: 1}) != request_seed(**FIRST)


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"draw": -1}, {"world_size": 2**20}])
def test_impossible_places_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="got"):
        request_seed(**FIRST | wrong)


def test_the_ledger_counts_posts_per_sample_until_it_is_resolved() -> None:
    ledger = SeedLedger(run_seed=7, rank=0, world_size=2)
    key = SampleKey(epoch=0, position=0, index=31)
    first, second = ledger.next_seed(key), ledger.next_seed(key)
    assert (first, second) == (request_seed(**FIRST), request_seed(**FIRST | {"draw": 1}))
    ledger.forget(key)
    assert ledger.next_seed(key) == first
