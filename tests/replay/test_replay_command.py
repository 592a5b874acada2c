"""``swift-stage2 replay``: exit status, and a mistake in one line. The good case is in ``tests/integration``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from real_model import STAGE1
from recorded_files import RecordedRank

from swift_stage2.assembly import start_run
from swift_stage2.cli import main
from swift_stage2.replay.verdict import Verdict, read_verdict
from swift_stage2.trainer import Stage2Trainer

VERDICT = Verdict(
    first_step=3, last_step=9, num_b_steps=2, num_compared=7, unfinished_step=None, difference=None
)


def test_no_record_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-stage2 replay: error: a replay needs ")
    assert not (tmp_path / "replay").exists()


def test_another_world_size_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        RecordedRank(tmp_path, rank=rank, world_size=2).train("A")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("got world_size=3, recorded 2; start 2 ranks")


def test_a_missing_data_set_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swift = {"model": str(STAGE1), "dataset": ["gone.jsonl"], "output_dir": "there", "report_to": ["wandb"]}
    RecordedRank(tmp_path, config={"swift": swift, "stage2_ab": {"schedule": {"b_ratio": 0.0}}}).train("A")
    here = os.getcwd()
    monkeypatch.setattr(
        os, "environ", dict(os.environ) | {"RANK": "0", "WORLD_SIZE": "1"}
    )  # and what it sets there
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "gone.jsonl" in line
    written = (tmp_path / "replay" / "config" / "rank0.yaml").read_text()
    assert str(tmp_path / "replay") in written  # where ms-swift's own files go
    assert "wandb" not in written
    assert os.getcwd() == here
    assert Stage2Trainer.make_run is start_run


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, 0, "equal: every loss of steps 3 to 9, 2 of them on channel B, is bit-equal on every rank"),
        ({"unfinished_step": 10}, 0, "every rank; step 10, which the run did not end, ended here"),
        (
            {"num_compared": 6, "difference": "step 9"},
            1,
            "differs: step 9; steps before it, all bit-equal: 6",
        ),
        (
            {"num_compared": 2},
            1,
            "not finished: steps from step 3 on, all bit-equal: 2; the record goes to step 9",
        ),
    ],
)
def test_a_verdict_is_a_status_and_a_sentence(
    tmp_path: Path, changes: dict[str, object], status: int, words: str
) -> None:
    verdict = replace(VERDICT, **changes)  # type: ignore[arg-type]
    assert verdict.status == status
    assert words in verdict.sentence
    verdict.write(tmp_path)
    assert read_verdict(tmp_path) == verdict


def test_no_verdict_is_none(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) is None
