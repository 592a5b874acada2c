"""When shared devices change hands: every wanted step is fed, by as few phases as can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.phase_schedule import PhaseSchedule

RATIOS = st.sampled_from([0.1, 0.25, 0.3, 0.6, 0.75, 1.0])


def make(b_ratio: float, phase_steps: int, num_steps: int) -> PhaseSchedule:
    return PhaseSchedule(1, b_ratio=b_ratio, phase_steps=phase_steps, num_steps=num_steps)


def begins(schedule: PhaseSchedule, step: int) -> bool:
    is_due = schedule.is_due(step, any_proven=step > 0, server_waits=step == 0)
    if is_due:
        schedule.begin(step)
    return is_due


@given(RATIOS, st.integers(1, 5), st.integers(1, 60), st.integers(0, 59))
def test_every_wanted_step_has_packs_of_a_phase_and_no_phase_begins_before_they_are_used_up(
    b_ratio: float, phase_steps: int, num_steps: int, resumed_at: int
) -> None:
    """An own account of packs, in steps; a run that is resumed has lost what was ready."""
    schedule, stock, num_phases = make(b_ratio, phase_steps, num_steps), 0, 0
    wanted = [step for step in range(num_steps) if wants_channel_b(step, b_ratio)]
    for step in range(num_steps):
        if step == resumed_at:
            schedule, stock = make(b_ratio, phase_steps, num_steps), 0
        if schedule.is_due(step, any_proven=True, server_waits=False):
            assert step in wanted
            assert stock == 0
            schedule.begin(step)
            stock, num_phases = schedule.num_left, num_phases + 1
            assert stock == min(phase_steps, sum(each >= step for each in wanted))
        stock -= step in wanted
        assert stock >= 0
        schedule.observe(step, is_fed=step in wanted)
    before = sum(step < resumed_at for step in wanted)
    assert num_phases == -(-before // phase_steps) + -(-(len(wanted) - before) // phase_steps)


def test_packs_that_run_out_begin_the_next_phase_early_and_one_that_made_none_lasts_as_long_as_any() -> None:
    schedule, begun = make(1.0, 4, 100), []
    fed = {0, 1, 2, 3, 4, 5}  # the second phase made packs for two steps, the third none
    for step in range(16):
        if begins(schedule, step):
            begun.append(step)
        schedule.observe(step, is_fed=step in fed or step >= 11)
    assert begun == [0, 4, 7, 11, 15]


def test_what_is_asked_for_begins_one_out_of_turn_and_nobody_begins_without_a_server() -> None:
    schedule = make(0.25, 4, 100)
    assert not begins(schedule, 1)
    schedule.is_asked_for = True
    assert begins(schedule, 1)
    assert not schedule.is_asked_for
    assert schedule.num_left == 4
    schedule.num_left = 0
    assert not schedule.is_due(3, any_proven=False, server_waits=False)
    assert schedule.is_due(3, any_proven=False, server_waits=True)
