"""The run directory of a launch that has ended, and the commands that follow it, which can be run as they stand."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from swift_stage2.evaluate.command import parse_options
from swift_stage2.launch.launcher import newest_run, next_commands


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11-merged"):
        (tmp_path / "a run" / name).mkdir(parents=True)
    return tmp_path / "a run"


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    (tmp_path / "val.jsonl").touch()
    return tmp_path / "val.jsonl"


def test_the_last_checkpoint_is_evaluated_on_the_runs_own_validation_set(
    run_dir: Path, validation: Path
) -> None:
    last, evaluate = next_commands(run_dir, {"val_dataset": [f"{validation}#100"]})
    assert last == f"last checkpoint: {run_dir / 'checkpoint-10'}"
    purpose, _, command = evaluate.partition(": ")
    program, subcommand, *words = shlex.split(command)
    options = parse_options(words)
    assert (purpose, program, subcommand) == ("evaluate it", "swift-stage2", "evaluate")
    assert (options.data, options.model) == (validation, str(run_dir / "checkpoint-10"))
    assert options.output == run_dir / "evaluation"


def test_an_adapter_is_merged_before_it_is_evaluated(run_dir: Path, validation: Path) -> None:
    (run_dir / "last-checkpoint").symlink_to("checkpoint-10")
    (run_dir / "checkpoint-10" / "adapter_config.json").write_text("{}")
    _, merge, evaluate = next_commands(run_dir, {"val_dataset": [str(validation)]})
    merged = str(run_dir / "checkpoint-10-merged")
    words = ["swift", "export", "--adapters", str(run_dir / "checkpoint-10"), "--merge_lora", "true"]
    assert shlex.split(merge.partition(": ")[2]) == [*words, "--output_dir", merged]
    assert parse_options(shlex.split(evaluate.partition(": ")[2])[2:]).model == merged


@pytest.mark.parametrize("swift", [{}, {"val_dataset": ["gone.jsonl"]}, {"val_dataset": ["owner/on-a-hub"]}])
def test_without_a_validation_set_here_there_is_nothing_to_evaluate(
    run_dir: Path, swift: dict[str, object]
) -> None:
    assert [*next_commands(run_dir, swift)] == [f"last checkpoint: {run_dir / 'checkpoint-10'}"]
    assert [*next_commands(run_dir / "checkpoint-10", swift)] == [], "without a checkpoint nothing is said"


@pytest.mark.parametrize("folder", [".", "v1-20260101"])
def test_the_newest_run_is_the_launchs_unless_it_is_an_earlier_one(tmp_path: Path, folder: str) -> None:
    for moment, run_dir in ((1.0, tmp_path / "v0-20250101"), (5.0, tmp_path / folder)):
        assert newest_run(tmp_path, 2.0) is None
        run_dir.mkdir(exist_ok=True)
        (run_dir / "args.json").touch()
        os.utime(run_dir / "args.json", (moment, moment))
    assert newest_run(tmp_path, 2.0) == tmp_path / folder
