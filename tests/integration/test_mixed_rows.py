"""A real job on a data set of fenced answers, images without objects, and rows that channel A trains alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_model import read_rows
from torchrun_job import LearnerRun, Server, run_learner, write_config

from swift_stage2.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

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
    # More rollouts than there are rows.
    run = run_learner(config, directory, ranks=2, inject="*:1:await_packs/4")
    assert run.status == 0, run.output[-3000:]
    return run


def test_no_sample_is_lost_or_given_up(run: LearnerRun) -> None:
    assert main(["report", str(run.directory)]) == 0
    assert [run.audit(rank, "quarantined") for rank in (0, 1)] == [[], []]
    starts = [start for rank in (0, 1) for start in run.audit(rank, "start")]
    assert {start["state"]["num_rows"] for start in starts} == {24}, "30 rows, 6 of them without objects"


def test_images_without_objects_are_drawn_matched_and_trained(run: LearnerRun) -> None:
    qualities = [each["quality"] for rank in (0, 1) for each in run.audit(rank, "matched")]
    empty = [quality for quality in qualities if quality["num_ground_truth"] == 0]
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
