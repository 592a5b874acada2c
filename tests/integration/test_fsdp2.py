"""FSDP2 on two real gloo ranks, full and LoRA: proven rounds, both channels; full tuning resumes from its shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun_job import RECORDER, TEMPLATE, LearnerRun, Server, run_learner, write_config

from swift_stage2.runtime.checkpoints import why_not_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHARDING = Path(__file__).parents[1] / "sharding_cpu_ranks.py"
_NUM_STEPS = 10
_SAVED = 6


@pytest.fixture(scope="module", params=["full", pytest.param("lora", marks=pytest.mark.slow)])
def runs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    rows_file: Path,
    server: Server,
) -> list[LearnerRun]:
    """A run, and with full tuning one that resumes from its checkpoint."""
    directory = tmp_path_factory.mktemp("runs") / request.param
    swift = {
        "max_steps": _NUM_STEPS,
        "tuner_type": request.param,
        "learning_rate": {"full": 1e-4, "lora": 1e-2}[request.param],
        "fsdp": "fsdp2",
        "external_plugins": [str(TEMPLATE), str(RECORDER), str(SHARDING)],
        "save_strategy": "steps",
        "save_steps": _SAVED,
    }
    config = write_config(directory, rows_file, server, b_ratio=0.5, swift=swift)
    first = run_learner(config, directory, ranks=2, inject="*:1:await_packs")
    assert first.status == 0, first.output[-3000:]
    if request.param == "lora":
        return [first]
    swift |= {"resume_from_checkpoint": str(directory / f"checkpoint-{_SAVED}"), "save_strategy": "no"}
    again = directory.with_name(f"{request.param}-resumed")
    config = write_config(again, rows_file, server, b_ratio=0.5, swift=swift)
    second = run_learner(config, again, ranks=2, inject=f"*:{_SAVED + 1}:await_packs")
    assert second.status == 0, second.output[-3000:]
    return [first, second]


def test_both_channels_train_on_shards_and_every_round_is_proven(runs: list[LearnerRun]) -> None:
    for run, num_steps in zip(runs, (_NUM_STEPS, _NUM_STEPS - _SAVED), strict=False):
        plans = [[(step["channel"], step["version"]) for step in run.audit(rank, "step")] for rank in (0, 1)]
        assert plans[0] == plans[1]
        assert len(plans[0]) == num_steps
        assert {channel for channel, _ in plans[0]} == {"A", "B"}
        reports = [each for record in run.audit(0, "round") for each in record["servers"].values()]
        assert reports
        assert [each["error"] for each in reports] == [None] * len(reports)
        assert reports[0]["proof"] == "checksums+canary"
        assert all(each["proof"].startswith("checksums") for each in reports)
        ends = [[r for r in run.recorded(rank) if "weights" in r] for rank in (0, 1)]
        assert [end["is_sharded"] for (end,) in ends] == [True, True]
        assert ends[0][0]["weights"] == ends[1][0]["weights"]


def test_a_checkpoint_is_whole_once_all_shards_are_written(runs: list[LearnerRun]) -> None:
    checkpoint = runs[0].directory / f"checkpoint-{_SAVED}"
    assert why_not_whole(checkpoint, needs_stage2=True) == ""
    (checkpoint / "optimizer_0" / ".metadata").unlink()
    assert why_not_whole(checkpoint, needs_stage2=True) == "optimizer_0/.metadata is missing"
