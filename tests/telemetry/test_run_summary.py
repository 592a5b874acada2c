from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from rich.console import Console
from run_facts import PLAN_A, PLAN_B, match, pack, quality, round_outcome, skipped, started, step, told

from swift_stage2.report.command import report_of
from swift_stage2.report.content import terminal_report
from swift_stage2.report.run_data import read_run
from swift_stage2.scheduling.step_plan import SkipReason, StepPlan
from swift_stage2.telemetry.events import Checkpoint, Warned
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.summary import summarise


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two ranks: six steps, four wanted on B, two run; two rounds, one of which proves nothing."""
    plans = [PLAN_A, PLAN_B, skipped(), PLAN_B, PLAN_A, skipped(SkipReason.SERVERS_SUSPECT)]
    for rank in range(2):
        telemetry = started(tmp_path, rank, 2)
        telemetry.record_round(0, round_outcome(1, True, False, seconds=2.0))
        for number, plan in enumerate(plans):
            packs = (pack(version=1), pack("q", version=2 - rank)) if plan is PLAN_B else ()
            with telemetry.activity("busy"):
                telemetry.record_step(step(number, plan, version=2, packs=packs))
        telemetry.record_round(5, round_outcome(2, False, False, seconds=4.0))
        match(telemetry, quality(pairs=3, predictions=4, truths=6))
        telemetry.pipeline.dropped(pack(), "dropped_oldest")
        telemetry.pipeline.count("rollouts_dropped_stale", 3)
        telemetry.pipeline.quarantined("key", "too_slow", "3 rollouts went stale")
        telemetry.close()
    return tmp_path


def test_what_was_wanted_and_what_ran(run_dir: Path) -> None:
    summary = summarise(run_dir)
    assert (summary.num_steps, summary.num_b_wanted, summary.num_b_run) == (6, 4, 2)
    assert summary.skips == {"not_enough_packs": 1, "servers_suspect": 1}
    assert summary.num_disagreements == 0


@pytest.mark.parametrize(("last", "num_too_early"), [(PLAN_B, 2), (PLAN_A, 0)])
def test_steps_that_came_before_any_pack_are_told_apart(
    tmp_path: Path, last: StepPlan, num_too_early: int
) -> None:
    telemetry = started(tmp_path)
    for number, plan in enumerate([skipped(), PLAN_A, skipped(), skipped(SkipReason.SERVERS_SUSPECT), last]):
        telemetry.record_step(
            step(number, plan, version=1, packs=(pack(version=1),) if plan is PLAN_B else ())
        )
    telemetry.record_step(step(5, skipped(), version=1))
    telemetry.close()
    assert summarise(tmp_path).num_b_too_early == num_too_early
    assert summarise(tmp_path).skips["not_enough_packs"] == 3


def test_losses_lags_and_quality(run_dir: Path) -> None:
    summary = summarise(run_dir)
    assert summary.drops == {
        "samples_quarantined/too_slow": 2,
        "packs_dropped_oldest": 2,
        "rollouts_dropped_stale": 6,
    }
    assert summary.lag_counts == {0: 2, 1: 6}
    assert summary.ratios["match/precision"] == 0.75
    assert summary.ratios["match/f1"] == 0.6
    assert summary.totals["steps"] == 6
    assert summary.totals["packs_trained"] == 8


def test_a_catch_up_is_no_round_and_its_servers_are_counted(tmp_path: Path) -> None:
    telemetry = started(tmp_path)
    telemetry.record_round(0, round_outcome(1, True, True))
    telemetry.record_round(6, round_outcome(2, True, True))
    telemetry.record_round(9, round_outcome(3, True, True))
    for step_number, proven in ((2, False), (3, True)):
        outcome = round_outcome(1, proven)
        telemetry.record_round(step_number, replace(outcome, is_catch_up=True))
    telemetry.close()
    summary = summarise(tmp_path)
    assert (summary.num_rounds_committed, summary.num_rounds_failed, summary.num_caught_up) == (3, 0, 1)
    assert summary.steps_between_versions == [6, 3]
    assert summary.totals["sync_servers_caught_up"] == 1
    (warning,) = told(tmp_path, Warned)
    assert warning.message == "the catch-up with version 1 did not prove a server: refused"


def test_rounds_by_phase(run_dir: Path) -> None:
    summary = summarise(run_dir)
    assert (summary.num_rounds_committed, summary.num_rounds_failed) == (1, 1)
    assert sorted(summary.round_seconds) == [2.0, 4.0]
    push = summary.phase_seconds["push"]
    assert (len(push), sum(push), median(push), max(push)) == (4, 4.0, 1.0, 1.5)
    assert set(summary.phase_seconds) == {"canary", "snapshot", "push", "prove"}
    assert summary.proofs == {"checksums": 1}
    assert summary.server_errors == {"refused": 3}


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    for rank, plan in enumerate((PLAN_B, PLAN_A)):
        telemetry = started(tmp_path, rank, 2)
        telemetry.record_step(step(0))
        telemetry.record_step(step(1, plan))
        telemetry.close()
    summary = summarise(tmp_path)
    assert summary.num_disagreements == 1
    assert _text(tmp_path).count("plans that differ between ranks") == 1


def _text(run_dir: Path, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(terminal_report(report_of(read_run([run_dir])).sections))
    return capture.get()


def test_a_killed_process_leaves_a_summary_and_its_lost_steps_do_not_count_twice(tmp_path: Path) -> None:
    killed = started(tmp_path)
    for number in range(4):
        if number == 2:
            checkpoint = json.loads(json.dumps(killed.state_dict()))
            killed.log.write(Checkpoint(step=2, save_id="s"))
            killed.record_round(2, round_outcome(1, True))
        killed.record_step(step(number, PLAN_B))
    with (tmp_path / "events" / "rank0.jsonl").open("a") as file:
        file.write('{"kind":"step","step":4,"chan')

    torn = summarise(tmp_path)
    assert (torn.num_steps, torn.num_b_run, torn.activity) == (4, 4, {})

    resumed = Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8)
    resumed.load_state_dict(checkpoint)
    resumed.record_start(run_id="again", step=2, save_id="s")
    resumed.record_step(step(2, PLAN_A))
    resumed.close()
    summary = summarise(tmp_path)
    assert (summary.num_steps, summary.num_b_run) == (3, 2)
    assert summary.num_rounds_committed == 0
    assert (summary.totals["steps"], summary.totals["b_steps_run"]) == (3, 2)
