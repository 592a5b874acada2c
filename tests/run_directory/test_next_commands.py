"""The lines that a run's end closes with can be run as they stand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from swift_stage2.channel_b.dialects import OBJECT_LIST
from swift_stage2.detections.prediction import answer_dialect, read_rows
from swift_stage2.evaluate.command import parse_options
from swift_stage2.run_directory.next_commands import next_commands


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11-merged"):
        (tmp_path / "a run" / name).mkdir(parents=True)
    return tmp_path / "a run"


BOXES = {"ref": ["car"], "bbox": [[1, 2, 3, 4]]}
LISTED = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'


def write_row(path: Path, answer: str, objects: dict[str, object] | None) -> Path:
    """A data set of one row."""
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": answer}]
    row = {"messages": messages, "images": ["a.png"], **({"objects": objects} if objects else {})}
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    return write_row(tmp_path / "val.jsonl", LISTED, BOXES)


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


def test_the_link_to_the_last_checkpoint_goes_before_its_number(run_dir: Path, validation: Path) -> None:
    (run_dir / "last-checkpoint").symlink_to("checkpoint-9")
    last, evaluate = next_commands(run_dir, {"val_dataset": str(validation)})
    assert last == f"last checkpoint: {run_dir / 'last-checkpoint'}"
    assert shlex.quote(str(run_dir / "last-checkpoint")) in evaluate


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


@pytest.mark.parametrize(
    ("answer", "objects", "reason"),
    [
        ("4", None, ":1: a row needs objects="),
        ("4", BOXES, ": no shipped dialect reads the first answer, "),
        ('[{"name": "car", "box": <bbox>}]', BOXES, ": no shipped dialect reads the first answer, "),
        (LISTED, {"ref": ["car"], "bbox": [[1, 2]]}, ":1: evaluate measures boxes, got the point bbox="),
        (LISTED, {**BOXES, "bbox_type": "norm1"}, ":1: boxes must be in pixels of the stored image"),
    ],
)
def test_what_evaluate_would_refuse_or_misread_is_not_recommended(
    run_dir: Path, tmp_path: Path, answer: str, objects: dict[str, object] | None, reason: str
) -> None:
    """As a task of one's own may have it: the run's start never asks for such rows' boxes."""
    data = write_row(tmp_path / "val.jsonl", answer, objects)
    _, told = next_commands(run_dir, {"val_dataset": [str(data)]})
    assert told.startswith(f"evaluate measures lists of boxes alone, and not {data}{reason}")
    assert told.count("\n") == 0
    assert "swift-stage2" not in told


def test_a_row_that_is_recommended_is_one_that_evaluate_reads(validation: Path) -> None:
    assert answer_dialect(read_rows(validation)) is OBJECT_LIST


def test_a_run_without_a_checkpoint_says_nothing(tmp_path: Path) -> None:
    assert [*next_commands(tmp_path, {})] == []
