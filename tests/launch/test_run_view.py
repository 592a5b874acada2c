"""The launcher's panel and its last line, from audits as real ranks write them."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest
from telemetry.run_facts import step
from telemetry.terminal import Terminal

from swift_stage2.launch.run_view import RunView, WaitNotice, describe_end
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.facade import Telemetry


def rank(run_dir: Path) -> Telemetry:
    return Telemetry(run_dir, 0, 1, tensorboard=False, queue_limit=8, total_steps=40)


def test_a_terminal_shows_the_run_that_began_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    since = time.time()
    with RunView(tmp_path, since, print) as view:
        view.refresh()
        assert terminal.getvalue() == "", "there is no run yet"
        telemetry = rank(tmp_path / "v0-20261121")
        telemetry.record_start(0)
        view.refresh()
        assert terminal.getvalue() == "", "no step has begun"
        telemetry.record_step(step(0, queue_depth=3))
        telemetry.record_step(step(1, queue_depth=5))
        view.refresh()
        telemetry.close()
    shown = "\n".join(terminal.screen())
    assert "2/40" in shown
    assert "5 of 8" in shown


def test_an_earlier_run_in_the_same_place_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    telemetry = rank(tmp_path)
    telemetry.record_start(0)
    telemetry.record_step(step(0))
    telemetry.close()
    with RunView(tmp_path, time.time() + 1, print) as view:
        view.refresh()
    assert terminal.getvalue() == ""


def test_a_resumed_run_counts_from_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for first in (0, 20):
        telemetry = rank(tmp_path)
        telemetry.record_start(first)
        telemetry.record_step(step(first))
        telemetry.close()
    with RunView(tmp_path, 0.0, print) as view:
        view.refresh()
    assert any("21/40" in line for line in terminal.screen())


@pytest.mark.parametrize("verbose", [False, True])
def test_elsewhere_a_line_is_told_every_few_steps_unless_the_ranks_own_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    shown: list[str] = []
    telemetry = rank(tmp_path)
    telemetry.record_start(0)
    with RunView(tmp_path, 0.0, shown.append, verbose=verbose) as view:
        for number in range(23):
            telemetry.record_step(step(number))
            view.refresh()
        telemetry.audit.write("warning", message="the queue is empty")
        view.refresh()
        view.refresh()
        telemetry.close()
    beginnings = [line.split(" | ")[0] for line in shown]
    steps = [f"[launch] step {number}/40" for number in (1, 11, 21)]
    last = ["[launch] warning: the queue is empty", "[launch] step 23/40"]
    assert beginnings == ([] if verbose else steps + last)
    assert all("\n" not in line for line in shown)


@pytest.mark.parametrize("folder", [".", "v1-20260101"])
def test_steps_and_channel_b_of_the_newest_run(tmp_path: Path, folder: str) -> None:
    for run_dir, num_steps in ((tmp_path / "v0-20250101", 1), (tmp_path / folder, 3)):
        telemetry = Telemetry(run_dir, 0, 1, tensorboard=False, queue_limit=8)
        plans = (StepPlan(Channel.A), StepPlan(Channel.B), StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS))
        for number, plan in enumerate(plans[:num_steps]):
            telemetry.record_step(step(number, plan))
        telemetry.close()
    os.utime(audit_path(tmp_path / "v0-20250101", 0), (1.0, 1.0))
    run_dir = tmp_path / folder
    assert (
        describe_end(tmp_path, 0, 2.0)
        == f"finished, 3 steps, B at 1 of 2 wanted (50%); run directory {run_dir}"
    )
    assert describe_end(tmp_path, 143, 2.0).startswith("ended with status 143, 3 steps")


def test_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8).close()
    os.utime(audit_path(tmp_path, 0), (1.0, 1.0))
    assert describe_end(tmp_path, 2, 2.0) == f"ended with status 2; no audit of this run in {tmp_path}"


def test_it_speaks_once_per_interval_with_the_seconds_passed_and_allowed() -> None:
    now, said = [100.0], list[str]()
    notice = WaitNotice(said.append, every_s=30, now_s=lambda: now[0])
    for moment in (100.0, 129.0, 130.0, 131.0, 165.0, 190.0, 195.0):
        now[0] = moment
        notice.remind("waiting for server0 to load", 300)
    assert said == [f"waiting for server0 to load, {seconds} s of 300 s" for seconds in (30, 65, 95)]
