"""A run of the shipped task ``point``: both channels train points through the real server. So few steps teach the tiny
model no well-formed point: what is matched is for ``channel_b/test_points.py`` to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_model import read_rows
from torchrun_job import TEMPLATE, LearnerRun, Server, run_learner, write_config

from swift_stage2.cli import main
from swift_stage2.data.survey import main as data_check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def pointed(row: dict[str, Any]) -> dict[str, Any]:
    """The same picture, asked for the centres of its objects, as ms-swift takes points."""
    labels, boxes = row["objects"]["ref"], row["objects"]["bbox"]
    listed = ", ".join('{"point_2d": <bbox>, "label": "<ref-object>"}' for _ in labels)
    return {
        "messages": [
            {"role": "user", "content": "<image>Point at all shapes."},
            {"role": "assistant", "content": f"[{listed}]"},
        ],
        "images": row["images"],
        "objects": {
            "ref": labels,
            "bbox": [[(x1 + x2) / 2, (y1 + y2) / 2] for x1, y1, x2, y2 in boxes],
            "region": [json.dumps(box) for box in boxes],  # which ms-swift drops
        },
    }


@pytest.fixture(scope="module")
def point_rows(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    rows = tmp_path_factory.mktemp("points") / "points.jsonl"
    rows.write_text("".join(json.dumps(pointed(row)) + "\n" for row in read_rows(rows_file)))
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, point_rows: Path, server: Server) -> LearnerRun:
    directory = tmp_path_factory.mktemp("runs") / "points"
    config = write_config(
        directory,
        point_rows,
        server,
        b_ratio=0.25,
        swift={
            "max_steps": 48,
            "learning_rate": 1e-3,
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": 8,
            "val_dataset": [str(point_rows)],
            "eval_strategy": "no",
            "external_plugins": [str(TEMPLATE)],
        },
        evaluation={"every_steps": 12, "num_samples": 4, "max_round_delay_steps": 40},
        matching={"max_distance": 0.3},
    )
    written = yaml.safe_load(config.read_text())
    written["stage2_ab"]["task"] = "point"
    config.write_text(yaml.safe_dump(written))
    found = run_learner(config, directory, ranks=1)
    assert found.status == 0, found.output[-4000:]
    return found


def test_both_channels_train_points(run: LearnerRun) -> None:
    steps = run.audit(0, "step")
    channels = [step["channel"] for step in steps]
    assert channels.count("B") > 2, [step["skip_reason"] for step in steps]
    assert channels.count("A") > 2
    assert run.audit(0, "quarantined") == []
    assert any(evaluation["counts"]["num_answered"] for evaluation in run.audit(0, "evaluation"))


def test_matches_are_of_points(run: LearnerRun) -> None:
    records = [
        json.loads(line) for line in (run.directory / "events" / "rank0.jsonl").read_text().splitlines()
    ]
    matches = [record for record in records if record["kind"] == "match"]
    assert {len(point) for match in matches for _, point in match["truth"]} == {2}
    assert all('"point_2d": [' in match["target"] for match in matches if match["truth"])


def test_evaluate_takes_the_answers_of_an_evaluation_during_training(
    run: LearnerRun, point_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = sorted((run.directory / "evaluations").glob("*.jsonl"))[-1]
    assert main(["evaluate", "--data", str(point_rows), "--predictions", str(newest), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["metrics"]["eval/recall_inside"]["value"] < 1
    assert facts["num_without_prediction"] == len(point_rows.read_text().splitlines()) - 4


def test_the_ledger_balances_and_the_gallery_has_the_points(
    run: LearnerRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(run.directory), "--output", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "balanced: every sample drawn" in printed
    assert "mean closeness" in printed
    assert page.stat().st_size > 0
    assert main(["rollouts", "--json", str(run.directory)]) == 0
    assert '"similarity": "closeness"' in capsys.readouterr().out


def test_the_rows_have_no_fault_as_points_and_are_no_boxes(
    point_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_check(["check", str(point_rows)]) == 0
    assert "dialect point_list" in capsys.readouterr().out
    assert data_check(["check", str(point_rows), "--task", "detection"]) == 1
    assert "a box must be four numbers" in capsys.readouterr().out
