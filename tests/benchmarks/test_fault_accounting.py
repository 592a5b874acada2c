"""The fault table's numbers, on audits written by hand: what each must show, and what it must not overlook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_records import batch, step, sync_round, taken
from ledger_run import LedgerRun

from benchmarks.faults.accounting import Moments, SampleCount, first_notice, gaps, pause, report
from swift_stage2.telemetry.ledger_account import RunAccount, account_of
from swift_stage2.telemetry.reading import read_ledgers

NO_SAMPLES = RunAccount(ranks=(), violations=())


def counted(directory: Path) -> SampleCount:
    account = account_of(read_ledgers([directory]))
    return SampleCount.of(account.ranks, account.violations)


def test_the_accounts_of_all_ranks_add_up(tmp_path: Path) -> None:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, num_rows=21) for rank in (0, 1)]
    for run in ranks:
        run.train_drawn(3)
        (bad, _) = run.draw(2)
        run.source.settle_quarantined(bad, "bad_sample", "no box")
    found = counted(tmp_path)
    assert found == SampleCount(drawn=10, trained=6, quarantined=2, in_hand=2)
    assert (found.lost, found.sentence) == (0, "10 drawn = 6 trained + 2 quarantined + 2 in hand")
    ranks[1].train(ranks[1].train_drawn(1))
    assert "no sample is trained twice" in counted(tmp_path).broken_rules


def test_a_gap_is_told_by_the_later_record() -> None:
    later = step(1, 3.0, activity_ns={"waiting": 500_000_000, "syncing": 250_000_000})
    (gap,) = gaps([step(0, 1.0, "B"), later])
    assert (gap.step, gap.channel, gap.seconds, gap.waiting_s, gap.syncing_s) == (0, "B", 2.0, 0.5, 0.25)


def steady(num_steps: int, seconds: float = 1.0, **late: float) -> list[dict[str, Any]]:
    """A-steps of one length, but for those named ``s<number>`` in ``late``, which begin so much later."""
    times, now = [], 0.0
    for number in range(num_steps):
        now += seconds + late.get(f"s{number}", 0.0)
        times.append(now)
    return [step(number, time) for number, time in enumerate(times)]


def test_a_pause_is_the_longest_step_around_the_fault_against_the_median_before() -> None:
    found = pause(gaps(steady(20, s12=4.0, s18=9.0)), [], fault=11.5, end=18.0)
    assert found.median_before_s == pytest.approx(1.0)
    assert found.longest_around_s == pytest.approx(5.0)  # the step of nine is behind the proof
    assert found.num_rounds == 0


def test_a_step_with_a_round_in_it_is_told_apart() -> None:
    steps = steady(20, s12=4.0)
    steps[12]["activity_ns"] = {"syncing": 4_000_000_000}
    found = pause(gaps(steps), [sync_round(15.0, seconds=4.0)], fault=11.5, end=18.0)
    assert found.longest_around_s == pytest.approx(1.0)
    assert (found.num_rounds, found.longest_round_s) == (1, 4.0)


def test_a_main_thread_that_waits_shows_even_if_the_step_is_as_long_as_others() -> None:
    steps = steady(20)
    for record in steps:
        record["activity_ns"] = {"waiting": 100_000_000}
    steps[13]["activity_ns"] = {"waiting": 900_000_000}
    assert pause(gaps(steps), [], fault=11.5, end=18.0).longest_wait_s == pytest.approx(0.8)


def test_notice_is_the_first_thing_that_only_the_fault_explains() -> None:
    quiet = [step(0, 1.0), batch(1.5, 8), batch(1.6, 0, "stopped"), sync_round(1.7)]
    assert first_notice([quiet], 0.0) is None
    early = {"kind": "warning", "time": 0.5, "message": "before the fault"}
    told = first_notice([[early, *quiet], [batch(3.0, 0, "lost"), sync_round(4.0, proven=False)]], 1.0)
    assert told is not None
    assert told["time"] == 3.0


def run_of(records: list[dict[str, Any]], **moments: float) -> Any:
    return report([records], NO_SAMPLES, Moments(fault=5.5, **moments))


def test_proof_and_b_count_only_after_the_fault_was_healed() -> None:
    steps = steady(20)
    steps[6]["channel"] = steps[17]["channel"] = "B"
    found = run_of([*steps, sync_round(8.0), sync_round(14.5)], healed=12.0)
    assert found.steps_until_proof == 13 - 4  # in step 4 it happened, after step 13 it was proven
    assert found.b_again_at_step == 17 - 4
    assert found.b_steps_meanwhile == 1


def test_without_a_proof_there_is_no_end() -> None:
    found = run_of([*steady(20), sync_round(8.0, proven=False)], healed=12.0)
    assert found.steps_until_proof is None
    assert found.b_again_at_step is None
    assert found.round_errors == ("it died",)


def test_rollouts_taken_between_restart_and_proof_are_counted() -> None:
    records = [
        *steady(20),
        taken(7.0, 3),
        batch(9.0, 3, "lost"),
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
    rounds = [sync_round(8.0), sync_round(12.0, proven=False), sync_round(14.5)]
    sound = [taken(11.0, 3, "run-8"), taken(16.0, 3, "run-16")]  # the last one has no record yet
    assert run_of([*steady(20), *rounds, *sound]).unproven_rollouts == 0
    for bad in (taken(12.5, 3, "run-12"), taken(12.5, 3, "run-16")):
        assert run_of([*steady(20), *rounds, *sound, bad]).unproven_rollouts == 3


def test_rollouts_asked_of_the_one_server_that_did_not_prove_are_counted() -> None:
    assert run_of([*steady(20), sync_round(14.5)], asked_unproven=2).unproven_rollouts == 2


def test_ranks_that_plan_differently_are_counted() -> None:
    one, other = steady(5), steady(5)
    other[3]["channel"] = "B"
    found = report([one, other], NO_SAMPLES, Moments(fault=0.5))
    assert found.num_disagreements == 1


@pytest.mark.parametrize(
    ("error", "caught_by"),
    [
        ("SERVER answers the canary with other tokens than the learner", "canary"),
        ("SERVER does not hold the weights it was sent: resident checksum of a.weight differs", "checksums"),
        ("the server was lost while weights were sent", "the server was lost while weights were sent"),
    ],
)
def test_a_spoilt_round_says_what_caught_it(error: str, caught_by: str) -> None:
    records = [*steady(20), sync_round(6.0, proven=False, error=error), sync_round(14.5)]
    assert run_of(records, healed=7.0, spoilt_round=6.0).caught_by == caught_by


def test_a_spoilt_round_that_was_proven_was_caught_by_nothing() -> None:
    assert (
        run_of([*steady(20), sync_round(6.0), sync_round(14.5)], healed=7.0, spoilt_round=6.0).caught_by
        == "nothing"
    )
    assert run_of([*steady(20), sync_round(6.0)], healed=7.0).caught_by is None


def test_the_rest_of_a_poisonous_batch_is_told() -> None:
    poisoned = batch(6.0, 7, "error_answer") | {"num_quarantined": 1, "num_posts": 9}
    (told,) = run_of([*steady(20), batch(5.0, 8), poisoned]).quarantining_batches
    assert told == "batch of 8: 1 quarantined, 7 answered, 0 returned, 9 POSTs"


def test_a_fault_without_a_single_step_around_it_has_no_longest_step() -> None:
    assert pause(gaps(steady(20)), [], fault=30.0, end=31.0).longest_around_s is None
