"""The fault table: what counts as a problem, and that nothing of this machine is told."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.faults.accounting import FaultReport, Pause, SampleCount
from benchmarks.faults.fault_table import RowResult, as_json, markdown
from benchmarks.faults.server import Leftovers

_PAUSE = Pause(
    num_before=5,
    num_around=9,
    median_before_s=0.5,
    longest_around_s=0.7,
    median_around_s=0.5,
    longest_wait_s=0.1,
    num_rounds=1,
    longest_round_s=0.4,
)
_REPORT = FaultReport(
    noticed_after_steps=0,
    noticed_as="http://127.0.0.1:34567/infer/: incarnation=0123456789abcdef0123 [/build/pair.cc:553] /out/weights",
    round_errors=(),
    proofs_passed=("canary",),
    steps_until_proof=30,
    steps_run_meanwhile=30,
    b_steps_meanwhile=1,
    b_skipped={"queue": 14},
    pause=_PAUSE,
    samples=SampleCount(drawn=10, trained=7, quarantined=1, in_hand=2),
    unproven_rollouts=0,
    counters={"sync_rounds_failed": 1, "rollouts_failed": 0},
    warnings=(),
    b_again_at_step=34,
)
_GOOD = RowResult(name="kill", title="kill | all", report=_REPORT, exit_status=0, seconds=60.0)


def test_a_row_that_went_well_has_no_problems() -> None:
    assert _GOOD.problems == ()


def test_every_loss_is_a_problem() -> None:
    for change in (
        {"samples": SampleCount(broken_rules=("no sample is trained twice",))},
        {"samples": SampleCount(records_lost=1)},
        {"unproven_rollouts": 3},
        {"num_disagreements": 1},
        {"b_again_at_step": None},
        {"caught_by": "nothing"},
    ):
        assert len(replace(_GOOD, report=replace(_REPORT, **change)).problems) == 1, change
    assert replace(_GOOD, exit_status=1).problems == ("the learner ended with status 1",)
    assert replace(_GOOD, left=Leftovers(shared_memory=("/dev/shm/psm_1",))).problems == ("1 things left",)


def test_a_row_that_broke_is_a_problem_and_one_that_is_impossible_is_not() -> None:
    assert RowResult(name="a", title="a", note="broke: no", seconds=3.0).problems == ("broke: no",)
    assert RowResult(name="a", title="a", note="not possible here").problems == ()


def test_the_table_has_one_line_per_row_and_no_address_or_path() -> None:
    heading, rule, line = markdown([_GOOD]).splitlines()
    assert heading.count("|") == rule.count("|") == line.replace("\\|", "").count("|")
    assert "127.0.0.1" not in line
    assert "/build" not in line
    assert "/out" not in line
    assert "0123456789abcdef" not in line
    assert "10 = 7 + 1 + 2; 0 |" in line
    assert "after 34 steps" in line


def test_the_json_holds_everything_measured() -> None:
    (row,) = as_json([_GOOD], {"server": "stock"})["rows"]
    assert row["report"]["steps_until_proof"] == 30
    assert "127.0.0.1" not in row["report"]["noticed_as"]
    assert row["problems"] == []
