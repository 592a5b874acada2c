"""The bound on rollouts of one version: it holds in any order of events, and never leaves a step without its packs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_stage2.channel_b.packing import decide_pack
from swift_stage2.scheduling.run_ahead import Place, Shares, most_samples

EVENTS = st.lists(st.tuples(st.sampled_from(("begin", "end", "round")), st.integers(0, 9)), max_size=60)


@given(EVENTS, st.integers(1, 8))
def test_no_version_ever_has_more_than_its_budget_and_every_end_gives_a_share_back(
    events: list[tuple[str, int]], budget: int
) -> None:
    shares, version, number = Shares(), 0, 0
    held: dict[Place, int] = {}
    for what, amount in events:
        if what == "begin":
            num_begun = min(amount, shares.num_left(version, budget))
            places = [(0, place) for place in range(number, number + num_begun)]
            number += num_begun
            shares.begin(places, version)
            held |= dict.fromkeys(places, version)
        elif what == "end":  # in any order, whatever their end is; some have ended before
            ended = [(0, place) for place in range(number) if place % (amount + 1) == 0]
            shares.end(ended)
            held = {place: begun_under for place, begun_under in held.items() if place not in ended}
        else:
            version += 1
        by_version = Counter(held.values())
        assert max(by_version.values(), default=0) <= budget
        assert all(shares.num_held(each) == by_version[each] for each in range(version + 1))
        assert shares.num_left(version, budget) == budget - by_version[version]
    shares.end(held)
    assert all(shares.num_left(each, budget) == budget for each in range(version + 1))


def test_a_smaller_budget_than_what_is_held_leaves_nothing() -> None:
    shares = Shares()
    shares.begin([(0, 1), (0, 2)], version=7)
    assert (shares.num_left(7, 1), shares.num_left(8, 1)) == (0, 1)


@pytest.mark.parametrize(
    ("packing_length", "shortest_prompt", "most"),
    [(4096, 300, 13), (100, 100, 1), (100, 101, 1), (99, 50, 1), (100, 50, 2), (10, 0, 10)],
)
def test_the_most_samples_of_a_pack(packing_length: int, shortest_prompt: int, most: int) -> None:
    assert most_samples(packing_length, shortest_prompt) == most


def packs_of_one_version(
    lengths: list[int], *, capacity: int, budget: int, fill: float, num_packs: int
) -> int:
    """Rollouts come one by one, packed by the pipeline's own rule, until a step's packs are there or none may begin.

    Nothing is trained meanwhile, nor does a version come: the worst that can be.
    """
    shares, waiting, made = Shares(), list[int](), 0
    for number, length in enumerate(lengths):
        is_last = shares.num_left(0, budget) == 1
        if not shares.num_left(0, budget) or made >= num_packs:
            break
        shares.begin([(0, number)], 0)
        waiting.append(length)
        # The queue starves, and what is out fills no pack any more: nothing else may begin.
        while chosen := decide_pack(waiting, capacity, fill, starving=is_last):
            waiting = [each for index, each in enumerate(waiting) if index not in chosen]
            made += 1
    return made


@given(st.data(), st.integers(1, 4), st.floats(0, 1))
@settings(max_examples=200)
def test_a_budget_of_full_packs_of_the_shortest_never_leaves_a_step_without_packs(
    data: st.DataObject, num_packs: int, fill: float
) -> None:
    capacity = data.draw(st.integers(4, 60))
    shortest = data.draw(st.integers(1, capacity))
    budget = num_packs * most_samples(capacity, shortest)
    lengths = data.draw(st.lists(st.integers(shortest, capacity), min_size=budget, max_size=budget))
    made = packs_of_one_version(lengths, capacity=capacity, budget=budget, fill=fill, num_packs=num_packs)
    assert made >= num_packs


def test_a_budget_that_fits_into_fewer_packs_leaves_the_step_without_one() -> None:
    lengths = [10] * 20
    assert packs_of_one_version(lengths, capacity=50, budget=5, fill=1.0, num_packs=2) == 1
    assert packs_of_one_version(lengths, capacity=50, budget=10, fill=1.0, num_packs=2) == 2
