from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.plugins.pipeline import FIRST_VERSION_VARIABLE, LAG_VARIABLE, DelayedQueue
from benchmarks.staleness import StaleArm, plan_arms, staleness_table
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import write_config
from swift_stage2.demo.scoring import DetectionScore
from swift_stage2.scheduling.version_clock import require_fresh


@dataclass
class StandInPack:
    version: int


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(FIRST_VERSION_VARIABLE, "9")
    return monkeypatch


def _train(lag: int, forced: pytest.MonkeyPatch, versions: list[int]) -> list[list[int]]:
    """Versions behind of what each step trains that gets something; every step finds two packs of its version."""
    forced.setenv(LAG_VARIABLE, str(lag))
    queue = DelayedQueue(8, 2)
    trained = []
    for version in versions:
        while queue.num_fresh(version) < 2:
            assert queue.has_room(version)
            queue.offer(StandInPack(version), current_version=version)  # type: ignore[arg-type]
        reservation = queue.reserve(2, current_version=version)
        if reservation is not None:
            packs = reservation.take()
            require_fresh(
                ((pack, pack.version) for pack in packs), current=version, window=queue.version_window
            )
            trained.append([version - pack.version for pack in packs])
    return trained


@pytest.mark.parametrize("lag", [0, 2, 8])
def test_packs_are_trained_so_many_versions_after_they_were_made(
    lag: int, forced: pytest.MonkeyPatch
) -> None:
    trained = _train(lag, forced, list(range(1, 30)))
    assert trained == [[lag, lag]] * (29 - 8), "every step from version 9 on, in every arm"


def test_a_version_that_no_step_wanted_makes_it_older_never_younger(forced: pytest.MonkeyPatch) -> None:
    trained = _train(2, forced, [version for version in range(1, 40) if version % 3])
    assert trained
    assert {lag for step in trained for lag in step} <= {2, 3}


def test_arms_of_an_objective_differ_in_the_lag_alone(tmp_path: Path) -> None:
    arms = list(plan_arms(tmp_path, 2, 2, (0, 8), ["corrected_target"]))
    assert [(lag, job.seed, job.b_ratio) for _, lag, job in arms] == [
        (None, 0, 0.0), (0, 0, 0.25), (8, 0, 0.25), (None, 1, 0.0), (0, 1, 0.25), (8, 1, 0.25),
    ]  # fmt: skip
    assert len({job.directory for _, _, job in arms}) == 6
    assert len({job.rows for _, _, job in arms[:3]}) == 1


def test_rewards_have_two_arms_per_lag_whose_losses_differ(tmp_path: Path) -> None:
    _, *arms = plan_arms(tmp_path, 2, 1, (0, 8), ["grpo", "corrected_target", "grpo"])
    assert len({job.directory for _, _, job in arms}) == 6
    told = []
    for loss, lag, job in arms:
        written = load_config(write_config(job, (51216, 51217)))
        stage2_ab, rollout = written.stage2_ab, written.rollout
        told.append((loss, lag, stage2_ab.objective, rollout.num_generations, rollout.decoding.temperature))
        if loss.startswith("grpo"):
            assert loss == f"grpo-{stage2_ab.channel_b.grpo.proximal}"
    assert told == [
        ("grpo-current", 0, "grpo", 4, 1.0),
        ("grpo-current", 8, "grpo", 4, 1.0),
        ("grpo-behaviour", 0, "grpo", 4, 1.0),
        ("grpo-behaviour", 8, "grpo", 4, 1.0),
        ("corrected_target", 0, "corrected_target", 1, 0.3),
        ("corrected_target", 8, "corrected_target", 1, 0.3),
    ]


def test_the_table_has_a_row_per_loss_and_lag_with_its_range(tmp_path: Path) -> None:
    def arm(lag: int | None, seed: int, f1: float, loss: str = "x") -> StaleArm:
        score = DetectionScore(precision=f1, recall=f1, f1=f1, mean_iou=0.5, num_images=8)
        mean_lag = None if lag is None else lag + 0.5
        return StaleArm(
            loss=loss, lag=lag, seed=seed, num_b_steps=3, mean_lag=mean_lag, max_lag=lag, score=score
        )

    start = DetectionScore(precision=0.1, recall=0.1, f1=0.1, mean_iou=0.5, num_images=8)
    table = staleness_table(start, [arm(None, 0, 0.3), arm(2, 0, 0.25), arm(2, 1, 0.75)], 50)
    assert [row[0] for row in table.rows] == ["stage 1, before", "A only", "x, lag 2"]
    assert table.rows[2][2:5] == ("2.5", "", "0.500 (0.250..0.750)")
    later = [arm(2, 0, 0.25), arm(8, 0, 0.125), arm(2, 1, 0.75), arm(8, 1, 0.5)]
    assert staleness_table(start, later, 50).rows[2][3] == "-0.188 (-0.250..-0.125)"
    both = [arm(None, 0, 0.5), *later, arm(2, 0, 0.5, "y"), arm(8, 0, 0.75, "y")]
    assert [(row[0], row[3]) for row in staleness_table(start, both, 50).rows] == [
        ("stage 1, before", ""),
        ("A only", "+0.250"),
        ("x, lag 2", ""),
        ("x, lag 8", "-0.188 (-0.250..-0.125)"),
        ("y, lag 2", ""),
        ("y, lag 8", "+0.250"),
    ]
