from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import command, overhead
from benchmarks.clocks import PLUGINS
from benchmarks.estimates import compare
from benchmarks.overhead import ArmName, arm_command, hook_share, order_of_arms, overhead_table
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import DemoJob, write_config

MS = 1_000_000


def test_arms_alternate_who_goes_first() -> None:
    assert [order_of_arms(pair)[0] for pair in range(4)] == ["plain", "ours", "plain", "ours"]
    assert all(set(order_of_arms(pair)) == set(ArmName) for pair in range(4))


def _clock(num_steps: int, hooks_ms: int, agree_ms: int) -> dict[str, list[int]]:
    return {
        "end_ns": [200 * MS * i for i in range(num_steps)],
        "hooks_ns": [hooks_ms * MS * i for i in range(num_steps)],
        "agree_ns": [agree_ms * MS * i for i in range(num_steps)],
    }


def test_the_share_of_hooks_is_their_time_over_the_steps() -> None:
    share = hook_share([_clock(20, 1, 2), _clock(20, 3, 2)])
    assert share.hooks == pytest.approx(2 / 200)
    assert share.agree == pytest.approx(2 / 200)
    assert share.median_agree_ms == pytest.approx(2.0)


def test_the_table_shows_measured_bound_and_budget() -> None:
    seconds = {arm: [np.full(10, 0.2)] for arm in ArmName}
    table = overhead_table(
        seconds,
        compare(seconds[ArmName.PLAIN], seconds[ArmName.OURS]),
        hook_share([_clock(20, 1, 2)]),
        in_turns=False,
    )
    for part in ("side by side", "200.0", "1.0000", "1.03", "0.500%", "1%"):
        assert part in table.markdown()


def _job(tmp_path: Path) -> DemoJob:
    job = DemoJob(directory=tmp_path, rows=tmp_path / "rows.jsonl", num_steps=9, b_ratio=0.0, num_ranks=2)
    write_config(job, (4001, 4002))
    return job


def test_both_arms_train_with_the_same_ms_swift_arguments(tmp_path: Path) -> None:
    job = _job(tmp_path)
    plain, ours = arm_command(ArmName.PLAIN, job), arm_command(ArmName.OURS, job)
    arguments = load_config(job.config_path).swift_arguments()
    program = plain.index("benchmarks.swift_program")
    assert list(plain[program + 1 :]) == ["sft", *arguments]
    assert ours[program:] == ("swift_stage2", "train", str(job.config_path))
    assert plain[:program] == ours[:program]
    assert "--nproc-per-node=2" in plain


def test_every_arm_is_given_a_clock_that_is_there(tmp_path: Path) -> None:
    assert overhead._job(tmp_path, 9, 2).plugins == (PLUGINS / "clocks.py",)
    assert (PLUGINS / "clocks.py").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_arms_side_by_side_begin_together_and_are_compared_while_both_train(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.main(["overhead", "--steps=30", "--repeats=1", "--ranks=1", "--output", str(out)]) == 0
    found = json.loads((out / "overhead.json").read_text())
    (plain,), (ours,) = found["clocks"]["plain"], found["clocks"]["ours"]
    assert (
        len(plain["end_ns"]) == len(ours["end_ns"]) == found["ratio"]["num_steps"] + 1 + overhead.NUM_WARMUP
    )
    # Each first step ends before the other arm's last: they ran at the same time.
    assert plain["end_ns"][0] < ours["end_ns"][-1]
    assert ours["end_ns"][0] < plain["end_ns"][-1]
    assert plain["hooks_ns"][-1] == 0 < ours["hooks_ns"][-1]
