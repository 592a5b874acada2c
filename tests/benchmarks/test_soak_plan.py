"""Which faults a soak gets: for every seed and length in order, apart, of every kind, and the same each time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults.commit import LONGEST_WRITE_S
from benchmarks.faults.soak_plan import (
    FEWEST_STEPS,
    NUM_LAST_STEPS,
    NUM_WARM_STEPS,
    ROOM_STEPS,
    FaultKind,
    PlannedFault,
    plan_faults,
)
from swift_stage2.errors import UserError

seeds = st.integers(0, 2**32)
kill_rooms = st.integers(ROOM_STEPS, 300)


def plan(seed: int, num_steps: int, kill_room: int = 100) -> tuple[PlannedFault, ...]:
    return plan_faults(seed, num_steps, kill_room_steps=kill_room)


@given(seeds, st.integers(FEWEST_STEPS, 5000), kill_rooms)
def test_every_fault_has_room_to_heal_before_the_next_and_before_the_end(
    seed: int, num_steps: int, kill_room: int
) -> None:
    faults = plan(seed, num_steps, kill_room)
    rooms = [kill_room if fault.kind is FaultKind.KILL_SERVER else ROOM_STEPS for fault in faults]
    assert faults[0].step >= NUM_WARM_STEPS
    assert all(a.step + room <= b.step for (a, b), room in zip(pairwise(faults), rooms, strict=False))
    assert faults[-1].step + rooms[-1] <= num_steps - NUM_LAST_STEPS


@given(seeds, kill_rooms)
def test_in_two_thousand_steps_every_kind_comes_equally_often_and_several_times(
    seed: int, kill_room: int
) -> None:
    times = Counter(fault.kind for fault in plan(seed, 2000, kill_room))
    assert set(times) == set(FaultKind)
    assert len(set(times.values())) == 1
    assert min(times.values()) >= 3


@given(seeds)
def test_three_hundred_steps_have_room_for_one_of_each(seed: int) -> None:
    assert sorted(fault.kind for fault in plan(seed, 300)) == sorted(FaultKind)


@given(seeds, st.integers(FEWEST_STEPS, 3000))
def test_the_same_seed_gives_the_same_faults_and_they_are_bounded(seed: int, num_steps: int) -> None:
    faults = plan(seed, num_steps)
    assert plan(seed, num_steps) == faults
    for fault in faults:
        assert 1 <= fault.count <= 8
        assert 0 <= fault.seconds <= (LONGEST_WRITE_S if fault.kind is FaultKind.SLOW_DISK else 4.0)
        assert fault.rank in (0, 1)


def test_another_seed_gives_other_faults() -> None:
    assert len({plan(seed, 2000) for seed in range(20)}) == 20
    stopped = {fault.rank for fault in plan(0, 2000) if fault.kind is FaultKind.STOP_RANK}
    assert stopped == {0, 1}


@pytest.mark.parametrize("num_steps", [-5, 0, FEWEST_STEPS - 1])
def test_steps_without_room_for_a_fault_are_refused(num_steps: int) -> None:
    with pytest.raises(UserError, match=f"got {num_steps}; write 76 or more"):
        plan(0, num_steps)
