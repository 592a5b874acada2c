"""What is told of a fault, on events written by hand: what each must show, and what it must not overlook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_records import failures, step, sync_round, taken
from hypothesis import given
from hypothesis import strategies as st
from ledger_run import LedgerRun

from benchmarks.faults.accounting import (
    Moments,
    account_sentence,
    first_notice,
    gaps,
    longest_wait,
    report,
)
from benchmarks.faults.soak import plan_faults, trends_of
from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import read_logs


def counted(directory: Path) -> str:
    return account_sentence(account_of(read_logs([directory])))


def test_the_accounts_of_all_ranks_add_up(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, num_rows=21) for rank in (0, 1)]
    for run in ranks:
        run.train_drawn(3)
        (bad, _) = run.draw(2)
        run.source.settle_quarantined(bad, "bad_sample", "no box")
    assert counted(tmp_path) == "10 drawn = 6 trained + 2 quarantined + 2 in hand; balanced"
    ranks[1].train(ranks[1].train_drawn(1))
    assert "no sample is trained twice" in counted(tmp_path)


def steady(num_steps: int, seconds: float = 1.0, **late: float) -> list[dict[str, Any]]:
    """A-steps of one length, but for those named ``s<number>`` in ``late``, which begin so much later."""
    times, now = [], 0.0
    for number in range(num_steps):
        now += seconds + late.get(f"s{number}", 0.0)
        times.append(now)
    return [step(number, time) for number, time in enumerate(times)]


def test_a_main_thread_that_waits_shows_even_if_the_step_is_as_long_as_others() -> None:
    steps = steady(20)
    for record in steps:
        record["activity_ns"] = {"waiting": 100_000_000}
    steps[13]["activity_ns"] = {"waiting": 900_000_000}
    assert longest_wait(gaps(steps), 11.5, 18.0) == pytest.approx(0.8)


def test_notice_is_the_first_thing_that_only_the_fault_explains() -> None:
    quiet = [step(0, 1.0), failures(1.5), failures(1.6, "stopped"), sync_round(1.7)]
    assert first_notice([quiet], 0.0) is None
    early = {"kind": "warning", "time": 0.5, "message": "before the fault"}
    told = first_notice([[early, *quiet], [failures(3.0, "lost"), sync_round(4.0, proven=False)]], 1.0)
    assert told is not None
    assert told["time"] == 3.0


def run_of(records: list[dict[str, Any]], **moments: float) -> Any:
    return report([records], Moments(fault=5.5, **moments))


def test_proof_and_b_count_only_after_the_fault_was_healed() -> None:
    steps = steady(20)
    steps[6]["channel"] = steps[17]["channel"] = "B"
    found = run_of([*steps, sync_round(8.0), sync_round(14.5)], healed=12.0)
    assert found.steps_until_proof == 13 - 4  # in step 4 it happened, after step 13 it was proven
    assert found.steps_until_b == 17 - 4
    assert found.problems == []


def test_without_a_proof_there_is_no_end() -> None:
    found = run_of([*steady(20), sync_round(8.0, proven=False)], healed=12.0)
    assert found.steps_until_proof is None
    assert found.problems == ["B did not run again"]
    assert found.noticed_as == "it died"


def test_rollouts_taken_between_restart_and_proof_are_counted() -> None:
    records = [
        *steady(20),
        taken(7.0, 3),
        failures(9.0, "lost"),
        taken(9.0, 5),
        sync_round(14.5),
        taken(15.0, 8),
    ]
    assert run_of(records, healed=12.0, restarted=8.0).unproven_rollouts == 5
    assert run_of(records, healed=12.0).unproven_rollouts == 0


def test_a_server_that_caught_up_between_two_rounds_is_proven() -> None:
    late = sync_round(12.5) | {"kind": "catch_up"}
    del late["committed"]
    records = [*steady(20), taken(9.0, 5), late, taken(13.0, 8), sync_round(14.5)]
    found = run_of(records, healed=12.0, restarted=8.0)
    assert (found.unproven_rollouts, found.steps_until_proof) == (5, 11 - 4)
    failed = sync_round(12.5, proven=False) | {"kind": "catch_up"}
    assert run_of([*steady(20), failed, sync_round(14.5)], healed=12.0).steps_until_proof == 13 - 4


def test_rollouts_made_by_weights_of_a_round_that_proved_nobody_are_counted() -> None:
    rounds = [sync_round(8.0), sync_round(12.0, version=2, proven=False), sync_round(14.5, version=3)]
    sound = [taken(11.0, 3, 1), taken(16.0, 3, 4)]  # the last one has no record yet
    assert run_of([*steady(20), *rounds, *sound]).unproven_rollouts == 0
    for bad in (taken(12.5, 3, 2), taken(12.5, 3, 4)):
        assert run_of([*steady(20), *rounds, *sound, bad]).unproven_rollouts == 3


@given(st.integers(0, 99), st.integers(216, 5000))
def test_every_fault_of_a_soak_has_room_to_heal_before_the_next_and_before_the_end(
    seed: int, num_steps: int
) -> None:
    plan = plan_faults(seed, num_steps, ["a", "b", "c"])
    assert plan == plan_faults(seed, num_steps, ["a", "b", "c"])
    begins = [step for step, _ in plan]
    assert begins[0] >= 16
    assert all(
        later - earlier >= 100 for earlier, later in zip(begins, [*begins[1:], num_steps], strict=True)
    )
    times = [[name for _, name in plan].count(name) for name in "abc"]
    assert max(times) - min(times) <= 1


def test_a_leak_of_one_process_is_found_on_that_one_and_a_short_life_says_nothing() -> None:
    steps = range(0, 2000, 10)
    found = trends_of(
        {
            ("rank 0", 1, "RSS, MiB"): [(step, 300.0 + step / 50) for step in steps],
            ("rank 1", 2, "RSS, MiB"): [(step, 300.0) for step in steps],
            ("publisher", 3, "threads"): [(step, 9.0 + step) for step in range(20)],
            ("publisher", 4, "threads"): [(step, 9.0) for step in steps],
        }
    )
    assert {name: each.verdict for name, each in found.items()} == {
        ("rank 0", "RSS, MiB"): "rising",
        ("rank 1", "RSS, MiB"): "flat",
        ("publisher", "threads"): "flat",
    }
