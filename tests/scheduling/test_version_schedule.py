from __future__ import annotations

import pytest

from swift_stage2.scheduling.version_schedule import VersionSchedule


def is_due(
    schedule: VersionSchedule, step: int, *, any_proven: bool = True, server_waits: bool = False
) -> bool:
    return schedule.is_due(step, any_proven=any_proven, server_waits=server_waits)


@pytest.fixture
def begun() -> VersionSchedule:
    """Every four steps; version 1 was begun at step 0 for servers that waited."""
    schedule = VersionSchedule(4)
    assert is_due(schedule, 0, any_proven=False, server_waits=True)
    assert schedule.begin(0) == 1
    return schedule


def test_the_first_begins_for_servers_that_wait_and_for_nobody_else() -> None:
    schedule = VersionSchedule(4)
    assert not is_due(schedule, 0, any_proven=False)
    assert (schedule.begun, schedule.begun_step, schedule.pending_step) == (0, None, None)
    assert is_due(schedule, 0, any_proven=False, server_waits=True)


def test_one_is_due_every_so_many_steps_after_the_last_was_begun(begun: VersionSchedule) -> None:
    steps = []
    for step in range(1, 21):
        if is_due(begun, step):
            steps.append(step)
            begun.begin(step)
    assert steps == [4, 8, 12, 16, 20]
    assert (begun.begun, begun.next_version) == (6, 7)


def test_a_due_one_stays_pending_until_it_begins_and_counts_from_there(begun: VersionSchedule) -> None:
    assert [is_due(begun, step) for step in (3, 4, 5, 6)] == [False, True, True, True]
    assert begun.pending_step == 4
    begun.begin(6)
    assert begun.pending_step is None
    assert [step for step in range(7, 12) if is_due(begun, step)] == [10, 11]


def test_without_a_server_none_is_due_and_one_that_waits_makes_it_due_out_of_turn(
    begun: VersionSchedule,
) -> None:
    assert is_due(begun, 4)
    assert not is_due(begun, 5, any_proven=False), "it is lost"
    assert begun.pending_step is None
    assert is_due(begun, 6, any_proven=False, server_waits=True)
    assert begun.begin(6) == 2
    assert is_due(begun, 7, server_waits=True), "another one waits"


def test_one_that_is_asked_for_is_due_at_once_and_goes_to_nobody_that_is_lost(begun: VersionSchedule) -> None:
    begun.is_asked_for = True
    assert not is_due(begun, 1, any_proven=False)
    assert is_due(begun, 2)
    begun.begin(2)
    assert not begun.is_asked_for
    assert [is_due(begun, step) for step in (3, 6)] == [False, True]


def test_the_cadence_counts_from_the_last_step_at_which_no_server_could_be_asked(
    begun: VersionSchedule,
) -> None:
    for step in (0, 1, 2):
        begun.hold(step)
    assert [step for step in range(3, 8) if is_due(begun, step)] == [6, 7]
    assert begun.begun == 1
