"""The interference bench: which steps are compared, and where the time went that they took."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.clocks import read_times
from benchmarks.interference import B_RATIO, SwitchedBlocks, clock_table, interference_of, notes, ratio_table
from benchmarks.learner_job import Arm, ArmRecords, write_arm_config
from benchmarks.plugins.pipeline import is_on
from benchmarks.stand_in_server import SPREAD, drawn_latency
from swift_stage2.config import Preprocessing, Proof, load_config
from swift_stage2.errors import ChildFailed
from swift_stage2.scheduling.bresenham import wants_channel_b

BLOCKS = SwitchedBlocks(num_steps=20, num_settling=8, num_pairs=4)


def test_blocks_go_off_on_on_off_so_that_a_drift_falls_on_both() -> None:
    modes = [is_on(step, 20) for step in range(0, BLOCKS.total_steps, 20)]
    assert modes == [False, True, True, False] * 2
    steps = np.arange(BLOCKS.total_steps)
    middle = {mode: steps[[is_on(int(step), 20) == mode for step in steps]].mean() for mode in (False, True)}
    assert middle[False] == middle[True]


@pytest.mark.parametrize("pair", range(4))
def test_compared_steps_are_settled_a_steps_at_the_same_places(pair: int) -> None:
    off, on = BLOCKS.compared_steps(pair, B_RATIO)
    assert [step % 20 for step in off] == [step % 20 for step in on]
    assert min(step % 20 for step in off) == 8
    assert not any(is_on(step, 20) for step in off)
    assert all(is_on(step, 20) for step in on)
    assert not any(wants_channel_b(step, B_RATIO) for step in off + on)
    assert {step // 40 for step in off + on} == {pair}


def _records(*, off_s: float, on_s: float, b_runs: bool = True) -> ArmRecords:
    """Half of what a step takes longer while the pipeline is on is blocked, a quarter each on a core and queued."""
    steps = range(BLOCKS.total_steps)
    walls = [on_s if is_on(step, 20) else off_s for step in steps]
    extra = [wall - off_s for wall in walls]
    clock = {
        "end_ns": walls,
        "main_ns": [off_s * 0.9 + more * 0.25 for more in extra],
        "queued_ns": [off_s * 0.1 + more * 0.25 for more in extra],
        "others_ns": [0.010 if is_on(step, 20) else 0.001 for step in steps],
    }
    totals = {name: np.cumsum(np.array(values) * 1e9).astype(int).tolist() for name, values in clock.items()}
    audit: list[dict[str, Any]] = [
        {
            "kind": "step",
            "step": step,
            "wants_b": wants_channel_b(step, B_RATIO),
            "channel": "B" if b_runs and is_on(step, 20) and wants_channel_b(step, B_RATIO) else "A",
        }
        for step in steps
    ]
    return ArmRecords(totals, [*audit, {"kind": "batch", "num_rollouts": 7}])


def test_the_difference_is_split_into_core_queue_and_blocked_time() -> None:
    found = interference_of(_records(off_s=0.2, on_s=0.22), BLOCKS)
    assert found.ratio.total.value == pytest.approx(1.1)
    assert found.ratio_on_core.total.value == pytest.approx((0.22 - 0.025) / 0.18)
    more = {name: np.median(found.on[name]) - np.median(found.off[name]) for name in found.on}
    expected = {"wall": 0.020, "main": 0.005, "queued": 0.005, "blocked": 0.010, "others": 0.009}
    assert more == pytest.approx(expected, abs=1e-6)
    assert (found.num_b_steps, found.num_b_wanted, found.num_rollouts) == (20, 20, 7)
    assert "missed" in ratio_table(found, Preprocessing.THREAD).rows[0][-1]
    assert "10.00" in clock_table(found, Preprocessing.THREAD).rows[3][-1]
    assert "20 of 20 wanted B steps" in notes(found)[0]
    assert "others_per_step" in asdict(found)


def test_a_budget_that_holds_says_so_for_the_value_and_for_its_bound() -> None:
    found = interference_of(_records(off_s=0.2, on_s=0.202), BLOCKS)
    assert ratio_table(found, Preprocessing.THREAD).rows[0][-1] == "held; bound held"


def test_a_run_in_which_channel_b_never_ran_measured_nothing() -> None:
    with pytest.raises(ChildFailed, match="got no step of it"):
        interference_of(_records(off_s=0.2, on_s=0.2, b_runs=False), BLOCKS)


def test_the_clock_reads_this_threads_time_apart_from_the_others() -> None:
    before = read_times()
    sum(range(200_000))
    after = read_times()
    spent = {name: after[name] - before[name] for name in before}
    slack_ns = 1_000_000  # the clocks are not read in one moment
    assert 0 < spent["main_ns"] <= spent["end_ns"] + slack_ns
    assert -slack_ns <= spent["others_ns"]
    assert spent["queued_ns"] >= 0


def test_a_wait_is_drawn_from_a_requests_seed_around_the_mean_and_some_are_ten_times_as_long() -> None:
    waits = [drawn_latency(2.0, 0.0, seed) for seed in range(500)]
    assert waits == [drawn_latency(2.0, 0.0, seed) for seed in range(500)]
    assert 2.0 * (1 - SPREAD) <= min(waits) < 1.2 < 2.8 < max(waits) <= 2.0 * (1 + SPREAD)
    slow = [drawn_latency(2.0, 0.05, seed) for seed in range(500)]
    assert [wait for wait in slow if wait <= max(waits)] == [
        wait for wait, each in zip(waits, slow, strict=True) if each == wait
    ]
    assert 10 < sum(wait > max(waits) for wait in slow) < 45


def test_the_runs_configuration_is_checked_and_starts_no_server(tmp_path: Path) -> None:
    arm = Arm(
        name="learner",
        directory=tmp_path / "job",
        rows=tmp_path / "rows.jsonl",
        num_steps=10,
        b_ratio=B_RATIO,
        ports=(4001, 4002),
        prefetch={"sync_every_steps": 999},
    )
    config = load_config(write_arm_config(arm))
    assert config.launch.servers == ()
    assert config.stage2_ab.channel_b.prefetch.sync_every_steps == 999
    assert config.rollout.sync.proof is Proof.CHECKSUM
