"""A real job on a data set of fenced answers, images without objects, and rows that channel A trains alone."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from real_model import read_rows
from torchrun_job import LearnerRun, Server, run_learner, write_config

from swift_stage2.cli import main
from swift_stage2.telemetry.ledger import read_ledgers

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 24
OBJECT = '{"label": "<ref-object>", "bbox_2d": <bbox>}'


def _mixed(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Every fifth row describes its image, every fifth shows nothing, the others are fenced and label-first."""
    objects, answer = row["objects"], ",\n".join([OBJECT] * len(row["objects"]["ref"]))
    if number % 5 == 0:
        row.pop("objects")
        return {**row, "messages": [row["messages"][0], {"role": "assistant", "content": "Some shapes."}]}
    if number % 5 == 1:
        objects, answer = {"ref": [], "bbox": []}, ""
    content = f"```json\n[\n{answer}\n]\n```" if answer else "```json\n[]\n```"
    messages = [row["messages"][0], {"role": "assistant", "content": content}]
    return {**row, "objects": objects, "messages": messages}


@pytest.fixture(scope="module")
def mixed_file(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [_mixed(row, number) for number, row in enumerate(read_rows(rows_file)[:30])]
    path = tmp_path_factory.mktemp("mixed") / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, mixed_file: Path, server: Server) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / "mixed"
    config = write_config(
        directory,
        mixed_file,
        server,
        b_ratio=0.5,
        swift={"max_steps": NUM_STEPS},
        rows_without_objects="channel_a_only",
    )
    run = run_learner(config, directory, ranks=2)
    assert run.status == 0, run.output[-3000:]
    return run


def test_no_sample_is_lost_or_given_up(run: LearnerRun) -> None:
    assert main(["report", str(run.directory)]) == 0
    assert [run.audit(rank, "quarantine") for rank in (0, 1)] == [[], []]
    starts = [
        record
        for records in read_ledgers([run.directory]).values()
        for record in records
        if "state" in record
    ]
    assert {record["state"]["num_rows"] for record in starts} == {24}, "30 rows, 6 of them without objects"


def test_images_without_objects_are_drawn_matched_and_trained(run: LearnerRun) -> None:
    records = [record for found in read_ledgers([run.directory]).values() for record in found]
    objects = [count for record in records if record["kind"] == "read" for count in record["num_objects"]]
    assert 0 in objects
    assert any(objects)
    empty = [
        record["quality"]
        for record in records
        if record["kind"] == "matched" and record["quality"]["num_ground_truth"] == 0
    ]
    assert empty
    assert all(quality["num_pairs"] == 0 for quality in empty)
    assert {step["channel"] for step in run.audit(0, "step")} == {"A", "B"}


def test_without_the_key_such_rows_refuse_the_run_with_their_place(
    tmp_path: Path, mixed_file: Path, server: Server
) -> None:
    config = write_config(tmp_path / "run", mixed_file, server, b_ratio=0.5, swift={"max_steps": 4})
    refused = run_learner(config, tmp_path / "run", ranks=1)
    assert refused.status != 0
    assert f"{mixed_file}:1: a row needs objects=" in refused.output
    assert "rows_without_objects: channel_a_only" in refused.output


def test_a_step_without_a_token_to_train_leaves_the_weights_finite(
    tmp_path: Path, mixed_file: Path, server: Server
) -> None:
    """Nothing of an empty answer weighs anything here: a mean over no token would be no number, for good."""
    nothing = [row for row in read_rows(mixed_file) if row.get("objects") == {"ref": [], "bbox": []}]
    rows = tmp_path / "nothing.jsonl"
    rows.write_text("\n".join(map(json.dumps, nothing)) + "\n", encoding="utf-8")
    directory = tmp_path / "run"
    target = {"weights": {"structure": 0.0, "closure": 0.0}}
    config = write_config(
        directory, rows, server, b_ratio=0.5, swift={"max_steps": 12, "logging_steps": 1}, target=target
    )
    run = run_learner(config, directory, ranks=1)
    assert run.status == 0, run.output[-3000:]
    assert "B" in {step["channel"] for step in run.audit(0, "step")}
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.e+-]+|nan)", run.output)]
    assert losses
    assert all(map(math.isfinite, losses)), losses
