from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from telemetry.run_facts import pack, round_outcome, step

from swift_stage2.demo.detection_score import DetectionScore
from swift_stage2.demo.summary_view import DemoOutcome, outcome_view, problems_of
from swift_stage2.scheduling.bresenham import wants_channel_b
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.telemetry.summary import RankActivity, RunSummary, summarise

BEFORE = DetectionScore(precision=0.25, recall=0.25, f1=0.25, mean_iou=0.6, num_images=128)
AFTER = DetectionScore(precision=0.5, recall=0.5, f1=0.5, mean_iou=0.7, num_images=128)
NUM_STEPS = 100


def _plan(number: int, num_skipped: int) -> StepPlan:
    if not wants_channel_b(number, 0.1):
        return StepPlan(Channel.A)
    if number < 10 * num_skipped:
        return StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS)
    return StepPlan(Channel.B)


def _summary(run_dir: Path, num_skipped: int) -> RunSummary:
    for rank in (0, 1):
        telemetry = Telemetry(run_dir, rank, 2, tensorboard=False, queue_limit=8)
        with telemetry.activity("syncing"):
            telemetry.record_round(0, round_outcome(1, True))
        for number in range(NUM_STEPS):
            plan = _plan(number, num_skipped)
            telemetry.record_step(step(number, plan, packs=(pack(),) if plan.channel is Channel.B else ()))
        telemetry.close()
    return summarise(run_dir)


def _outcome(summary: RunSummary) -> DemoOutcome:
    return DemoOutcome(
        summary=summary,
        before=BEFORE,
        after=AFTER,
        num_steps_wanted=NUM_STEPS,
        left_processes=(),
        held_ports=(),
    )


@pytest.mark.parametrize(("num_skipped", "is_success"), [(0, True), (2, True), (3, False)])
def test_b_must_run_at_four_of_five_wanted_steps(tmp_path: Path, num_skipped: int, is_success: bool) -> None:
    problems = problems_of(_outcome(_summary(tmp_path, num_skipped)))
    assert (problems == ()) is is_success
    if not is_success:
        assert problems == ("channel B must run at 80% of 10 wanted steps at least, it ran at 7",)


@pytest.fixture
def good(tmp_path: Path) -> DemoOutcome:
    return _outcome(_summary(tmp_path, 0))


def test_what_is_left_behind_is_a_problem(good: DemoOutcome) -> None:
    assert problems_of(replace(good, left_processes=("7 (python)",))) == ("processes are left: 7 (python)",)
    assert problems_of(replace(good, held_ports=(8000,))) == ("ports are still held: 8000",)


def test_a_run_that_ended_early_is_a_problem(good: DemoOutcome) -> None:
    assert problems_of(replace(good, num_steps_wanted=101)) == ("100 of 101 optimizer steps ran",)


def test_failed_proofs_and_disagreements_are_problems(good: DemoOutcome) -> None:
    summary = replace(good.summary, num_disagreements=2, server_errors={"wrong checksum": 1})
    assert problems_of(replace(good, summary=summary)) == (
        "ranks disagreed about 2 steps",
        "a server failed 1 sync rounds: wrong checksum",
    )


def test_time_that_nobody_accounts_for_is_a_problem(good: DemoOutcome) -> None:
    activity = (RankActivity(0, {"busy": 1.0, "waiting": 0.5}, 2.0),)
    summary = replace(good.summary, activity=activity)
    assert problems_of(replace(good, summary=summary)) == (
        "rank 0's activities miss its wall time by 0.500 s",
    )


def test_a_run_without_channel_b_wants_none_of_it(good: DemoOutcome) -> None:
    assert problems_of(replace(good, summary=replace(good.summary, num_b_wanted=0, num_b_run=0))) == ()


def _text(outcome: DemoOutcome) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(outcome_view(outcome))
    return stream.getvalue()


def test_the_view_shows_the_answers(good: DemoOutcome) -> None:
    text = _text(good)
    for part in ("B run", "10 (100%)", "0.250", "0.500", "whole round", "syncing", "wall", "128 scenes"):
        assert part in text
    assert "Left behind: no process, no port." in text
    assert "Everything ran and ended as it should." in text


def test_the_view_tells_of_problems_instead_of_success(good: DemoOutcome) -> None:
    text = _text(replace(good, held_ports=(8000,)))
    assert "Left behind: no process, 1 port." in text
    assert "! ports are still held: 8000" in text
    assert "as it should" not in text
