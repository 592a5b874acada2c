"""A listed server that is started after the run has begun joins a real job of two ranks by the real command.

The job is recorded, with a version that this server proves late and the death of the first one; a replay of it ends
in the same bits.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched_run import LaunchedRun, write_launch_config
from torchrun_job import DROPOUT, LearnerRun, Server, assert_replays, free_port, start_server

from swift_stage2.telemetry.account import account_of
from swift_stage2.telemetry.event_log import event_path, read_logs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def _asked(directory: Path, rank: int, base_url: str) -> list[dict[str, Any]]:
    if not event_path(directory, rank).exists():
        return []
    return [each for each in LearnerRun(0, "", directory).audit(rank, "sent") if each["server"] == base_url]


def _steps_ahead(run: LaunchedRun) -> list[dict[str, Any]]:
    """Steps with a version of a round that has not ended: its first server has proven it, another one has not."""
    steps, rounds = run.audit("step"), run.audit("round")
    ended = max(record["version"] for record in rounds)
    return [record for record in steps if record["version"] > ended]


def _prove_late(late: Server, run: LaunchedRun) -> None:
    """A round in which ``late``, the second one, installs and proves long after the first has."""
    os.killpg(late.process.pid, signal.SIGSTOP)
    try:
        run.wait_until(lambda: len(_steps_ahead(run)) >= 3, "a round that one server has proven")
        ahead = _steps_ahead(run)[-1]["version"]
    finally:
        os.killpg(late.process.pid, signal.SIGCONT)
    run.wait_until(lambda: any(each["version"] == ahead for each in run.audit("round")), "that round's end")
    (record,) = [each for each in run.audit("round") if each["version"] == ahead]
    assert {name: report["proven"] for name, report in record["servers"].items()} == {"0": True, "1": True}


def test_a_listed_server_that_starts_after_the_run_is_proven_and_asked_by_both_ranks(
    tmp_path: Path, rows_file: Path
) -> None:
    directory, server = tmp_path / "run", start_server(tmp_path)
    port = free_port()
    absent = {"base_url": f"http://127.0.0.1:{port}", "group_port": free_port()}
    present = {"base_url": server.base_url, "group_port": server.group_port}
    config = write_launch_config(
        directory, rows_file, present, {}, record=True, save_strategy="no", **DROPOUT
    )
    written = yaml.safe_load(config.read_text())
    written["rollout"] |= {"servers": [present, absent], "start_timeout_s": 5}
    written["launch"]["servers"], written["launch"]["learner"]["nproc_per_node"] = [], 2
    config.write_text(yaml.safe_dump(written))
    run, late = LaunchedRun(config, directory), None
    try:
        run.wait_until(lambda: run.num_b_steps() > 0, "channel B with the first server alone")
        (told,) = [each["message"] for each in run.audit("warning") if absent["base_url"] in each["message"]]
        assert told == (
            "1 of 2 servers did not answer within rollout.start_timeout_s=5 and join when they do: "
            f"{absent['base_url']}"
        )
        late = start_server(tmp_path, port=port)
        run.wait_until(
            lambda: all(_asked(directory, rank, late.base_url) for rank in (0, 1)), "rollouts of the second"
        )
        _prove_late(late, run)
        server.kill()
        killed_at, num_b_steps = time.time(), run.num_b_steps()
        run.wait_until(lambda: run.num_b_steps() > num_b_steps + 4, "channel B without the first")
    finally:
        server.kill()
        if run.process.poll() is None:
            run.stop()
        if late is not None:
            late.kill()
    for rank in (0, 1):
        of_rank = partial(LearnerRun(0, "", directory).audit, rank)
        rounds = sorted((*of_rank("round"), *of_rank("catch_up")), key=lambda each: each["time"])
        proofs = [each for each in rounds if "1" in each["servers"] and each["servers"]["1"]["proven"]]
        assert min(each["time"] for each in _asked(directory, rank, late.base_url)) > proofs[0]["time"]
    lost = [each for each in of_rank("finished") if each["server"] == server.base_url]
    assert max(each["time"] for each in lost) > killed_at
    assert account_of(read_logs([directory])).is_balanced
    num_steps = len(of_rank("step"))
    assert_replays(LearnerRun(0, run.output, directory), num_steps, tmp_path / "replay")
