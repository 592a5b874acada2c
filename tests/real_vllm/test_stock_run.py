"""The main job of two real torchrun ranks on the unmodified ``swift rollout``: B runs, every round is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stock_server import ServerProcess
from torchrun_job import LearnerRun, run_learner, write_config

_NUM_STEPS = 44


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.ci), "lora"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows: Path, stock: ServerProcess
) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / request.param
    rate = {"full": 1e-4, "lora": 1e-2}[request.param]
    swift = {"max_steps": _NUM_STEPS, "tuner_type": request.param, "learning_rate": rate}
    config = write_config(directory, rows, stock, b_ratio=0.3, swift=swift, preprocessing="process")
    run = run_learner(config, directory, ranks=2, inject="*:3:await_packs,*:3:await_rounds")
    assert run.status == 0, run.output[-3000:]
    return run


def _steps(run: LearnerRun, rank: int) -> list[dict[str, Any]]:
    return run.audit(rank, "step")


def test_channel_b_runs_and_plans_are_identical_on_all_ranks(run: LearnerRun) -> None:
    plans = [[(step["channel"], step["version"]) for step in _steps(run, rank)] for rank in (0, 1)]
    assert plans[0] == plans[1]
    assert len(plans[0]) == _NUM_STEPS
    wanted = [step for step in _steps(run, 0) if step["wants_b"]]
    ran = [step for step in wanted if step["channel"] == "B"]
    assert ran, [step["skip_reason"] for step in wanted]
    assert all(step["packs"] for step in ran)


def test_every_round_is_proven_by_the_canary(run: LearnerRun) -> None:
    rounds = run.audit(0, "round")
    assert len(rounds) >= 5
    reports = [report for record in rounds for report in record["servers"].values()]
    assert {report["proof"] for report in reports} == {"canary"}
    assert all(report["proven"] for report in reports), [report["error"] for report in reports]
    assert [record["version"] for record in rounds] == list(range(1, len(rounds) + 1))


def test_weights_are_bit_equal_across_ranks(run: LearnerRun) -> None:
    weights = [[r["weights"] for r in run.recorded(rank) if "weights" in r] for rank in (0, 1)]
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]
