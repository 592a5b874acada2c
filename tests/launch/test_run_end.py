"""The launcher's last line, from event logs as real ranks write them, and what it says while it waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from telemetry.run_facts import step

from swift_stage2.launch.run_end import describe_end
from swift_stage2.scheduling.step_plan import Channel, SkipReason, StepPlan
from swift_stage2.telemetry.event_log import event_path
from swift_stage2.telemetry.facade import Telemetry
from swift_stage2.terminal.progress import WaitNotice


@pytest.mark.parametrize("folder", [".", "v1-20260101"])
def test_steps_and_channel_b_of_the_newest_run(tmp_path: Path, folder: str) -> None:
    for run_dir, num_steps in ((tmp_path / "v0-20250101", 1), (tmp_path / folder, 3)):
        telemetry = Telemetry(run_dir, 0, 1, tensorboard=False, queue_limit=8)
        telemetry.record_start(run_id="r", step=0)
        plans = (StepPlan(Channel.A), StepPlan(Channel.B), StepPlan(Channel.A, SkipReason.NOT_ENOUGH_PACKS))
        for number, plan in enumerate(plans[:num_steps]):
            telemetry.record_step(step(number, plan))
        telemetry.close()
    os.utime(event_path(tmp_path / "v0-20250101", 0), (1.0, 1.0))
    run_dir = tmp_path / folder
    assert (
        describe_end(tmp_path, 0, 2.0)
        == f"finished, 3 steps, B at 1 of 2 wanted (50%); run directory {run_dir}"
    )
    assert describe_end(tmp_path, 143, 2.0).startswith("ended with status 143, 3 steps")


def test_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, 0, 1, tensorboard=False, queue_limit=8)
    telemetry.record_warning("why")
    telemetry.close()
    os.utime(event_path(tmp_path, 0), (1.0, 1.0))
    assert describe_end(tmp_path, 2, 2.0) == f"ended with status 2; no events of this run in {tmp_path}"


def test_it_speaks_once_per_interval_with_the_seconds_passed_and_allowed() -> None:
    now, said = [100.0], list[str]()
    notice = WaitNotice(said.append, every_s=30, now_s=lambda: now[0])
    for moment in (100.0, 129.0, 130.0, 131.0, 165.0, 190.0, 195.0):
        now[0] = moment
        notice.remind("waiting for server0 to load", 300)
    assert said == [f"waiting for server0 to load, {seconds} s of 300 s" for seconds in (30, 65, 95)]
