from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.channel_b.rollouts.requests import SeedLedger
from swift_stage2.config.rollout import MAX_REQUESTS_PER_POST
from swift_stage2.records import SampleKey

LARGEST = 2**31 - 1
KEY = SampleKey(epoch=0, position=0, index=31)
counts = st.integers(min_value=0, max_value=10**12)


def ledger(rank: int = 0, world_size: int = 2, run_seed: int = 7) -> SeedLedger:
    return SeedLedger(run_seed=run_seed, rank=rank, world_size=world_size)


@given(world_size=st.integers(1, 1024), data=st.data(), run_seed=st.integers(), epoch=counts, position=counts)
def test_every_seed_of_a_post_lies_in_its_ranks_own_interval(
    world_size: int, data: st.DataObject, run_seed: int, epoch: int, position: int
) -> None:
    """So two ranks never have a common one, and 0 is none."""
    rank = data.draw(st.integers(min_value=0, max_value=world_size - 1))
    seed = ledger(rank, world_size, run_seed).next_seed(SampleKey(epoch, position, 0))
    width = LARGEST // world_size
    last = seed + MAX_REQUESTS_PER_POST - 1  # an engine adds the request's number to the seed
    assert 1 + rank * width <= seed
    assert last <= (rank + 1) * width <= LARGEST


def test_each_part_of_the_place_changes_the_seed() -> None:
    keys = [KEY, KEY._replace(epoch=1), KEY._replace(position=1), KEY._replace(attempt=1)]
    seeds = [ledger().next_seed(key) for key in keys]
    seeds += [ledger(run_seed=8).next_seed(KEY), ledger(rank=1).next_seed(KEY)]
    assert len(set(seeds)) == 6


def test_every_post_of_a_sample_has_another_seed_until_it_is_resolved() -> None:
    seeds = ledger()
    first, second = seeds.next_seed(KEY), seeds.next_seed(KEY)
    assert first != second
    seeds.forget(KEY)
    assert seeds.next_seed(KEY) == first == ledger().next_seed(KEY)
