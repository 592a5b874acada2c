"""Benches that score trained arms: arms differ in one thing, and gains are taken seed by seed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.learning import LearningArm, learning_table, plan_jobs
from benchmarks.plugins.lagging import FIRST_VERSION_VARIABLE, LAG_VARIABLE, DelayedQueue
from benchmarks.staleness import StaleArm, plan_arms, staleness_table
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import SCORES, STAGE1, write_config
from swift_stage2.scheduling.version_clock import require_fresh


def _score(f1: float) -> dict[str, float]:
    return dict.fromkeys(SCORES, f1) | {"num_images": 128}


def _arm(name: str, seed: int, f1: float) -> LearningArm:
    return LearningArm(
        name=name, seed=seed, num_b_wanted=30, num_b_run=29, train_seconds=60.0, score=_score(f1)
    )


def test_arms_differ_in_nothing_but_the_share_of_b_and_its_objective(tmp_path: Path) -> None:
    options = argparse.Namespace(
        steps=2,
        seeds=2,
        b_ratios=[0.0, 0.3],
        objective=["corrected_target", "grpo"],
        kind="shapes",
        learning_rate=1e-4,
    )
    jobs = list(plan_jobs(tmp_path, options))
    arms = [(0.0, "corrected_target"), (0.3, "corrected_target"), (0.3, "grpo")]
    assert [(job.seed, job.b_ratio, job.objective) for job in jobs] == [
        (seed, *arm) for seed in (0, 1) for arm in arms
    ]
    for of_seed in (jobs[:3], jobs[3:]):
        assert of_seed[0].rows.is_file()
        assert len({(job.rows, job.num_steps, job.model, str(job.swift)) for job in of_seed}) == 1
    assert jobs[0].model == STAGE1
    assert jobs[0].rows.read_text() != jobs[3].rows.read_text()
    assert len({job.directory for job in jobs}) == 6
    assert load_config(write_config(jobs[2], (4001, 4002))).stage2_ab.objective == "grpo"
    first, second = (tmp_path / f"seed{seed}" / "held_out" for seed in (0, 1))
    for image in first.glob("*.png"):
        assert image.read_bytes() == (second / image.name).read_bytes()


def test_gains_are_taken_seed_by_seed_and_shown_with_their_range() -> None:
    arms = [_arm("A only", 0, 0.5), _arm("B", 0, 0.625), _arm("A only", 1, 0.25), _arm("B", 1, 0.5)]
    table = learning_table(_score(0.2), arms, 100)
    start, alone, b = table.rows
    gain, f1 = (table.columns.index(name) for name in ("F1 over A only of the same seed", "F1"))
    assert (start[f1], alone[gain], b[1]) == ("0.200", "", "58 of 60")
    assert b[gain] == "+0.188 (+0.125..+0.250)"
    assert b[f1] == "0.562 (0.500..0.625)"


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


def test_arms_of_a_lag_differ_in_the_lag_alone(tmp_path: Path) -> None:
    arms = list(plan_arms(tmp_path, 2, 2, (0, 8)))
    assert [(lag, job.seed, job.b_ratio) for lag, job in arms] == [
        (None, 0, 0.0), (0, 0, 0.25), (8, 0, 0.25), (None, 1, 0.0), (0, 1, 0.25), (8, 1, 0.25),
    ]  # fmt: skip
    assert len({job.directory for _, job in arms}) == 6
    assert len({job.rows for _, job in arms[:3]}) == 1


def test_the_table_has_a_row_per_lag_beside_the_first() -> None:
    def arm(lag: int | None, f1: float) -> StaleArm:
        mean_lag = None if lag is None else lag + 0.5
        return StaleArm(lag=lag, seed=0, num_b_steps=3, mean_lag=mean_lag, score=_score(f1))

    table = staleness_table(_score(0.1), [arm(None, 0.375), arm(2, 0.25), arm(8, 0.125)], 50)
    assert [(row[0], row[2], row[3]) for row in table.rows] == [
        ("stage 1, before", "", ""),
        ("A only", "", "+0.125"),
        ("lag 2", "2.5", ""),
        ("lag 8", "8.5", "-0.125"),
    ]
