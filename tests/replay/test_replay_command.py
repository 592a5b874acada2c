"""``swift-stage2 replay``: exit status, and a mistake in one line. The good case is in ``tests/integration``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from real_model import STAGE1
from recorded_files import RecordedRank

from swift_stage2.cli import main
from swift_stage2.replay import command
from swift_stage2.replay.recorded_run import ReplayVerdict, read_verdict

VERDICT = ReplayVerdict(first_step=3, last_step=9, num_b_steps=2, num_compared=7, difference=None)


def test_no_record_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-stage2 replay: error: a run's directory holds ")
    assert not (tmp_path / "replay").exists()


def test_a_missing_data_set_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swift = {"model": str(STAGE1), "dataset": ["gone.jsonl"], "output_dir": "there", "report_to": ["wandb"]}
    RecordedRank(tmp_path, config={"swift": swift, "stage2_ab": {"schedule": {"b_ratio": 0.0}}}).train("A")
    here = os.getcwd()
    # And what it sets there
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"RANK": "0", "WORLD_SIZE": "1"})
    assert main(["replay", str(tmp_path)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "gone.jsonl" in line
    written = (tmp_path / "replay" / "config" / "rank0.yaml").read_text()
    assert str(tmp_path / "replay") in written  # where ms-swift's own files go
    assert "wandb" not in written
    assert os.getcwd() == here


def _run_dir(tmp_path: Path) -> Path:
    config = {"swift": {}, "launch": {"learner": {"shutdown_timeout_s": 30.0}}}
    RecordedRank(tmp_path / "job" / "run", config=config).train("A")
    return tmp_path / "job" / "run"


def _files(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file", "--output must be a directory that can be written, got "),
        ("file/below", "--output must be a directory that can be written, got "),
        ("thesis", "with other files; name another one"),
        ("job/run/events", "with other files; name another one"),
        ("job/run", "--output must not hold the run itself, got "),
        ("job", "--output must not hold the run itself, got "),
        ("link", "--output must not hold the run itself, got "),
    ],
)
def test_an_output_that_is_not_the_replays_is_one_line_and_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, words: str
) -> None:
    run_dir = _run_dir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(tmp_path / "job")
    before = _files(tmp_path)
    assert main(["replay", str(run_dir), "--output", str(tmp_path / output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--output" in line
    assert words in line
    assert _files(tmp_path) == before


def test_an_earlier_replay_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = _run_dir(tmp_path)
    monkeypatch.setattr(command, "run_plan", lambda *_, **__: 70)  # ends without a verdict
    assert main(["replay", str(run_dir)]) == 70
    VERDICT.write(run_dir / "replay")
    assert main(["replay", str(run_dir)]) == 70
    assert read_verdict(run_dir / "replay") is None


def test_a_rank_leaves_its_verdict_to_who_started_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift_stage2.replay.rank.replay_rank", lambda *_, **__: VERDICT)
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "out").mkdir()
    assert main(["replay", str(_run_dir(tmp_path)), "--output", str(tmp_path / "out")]) == 0
    assert "[replay]" not in capsys.readouterr().out
    assert read_verdict(tmp_path / "out") == VERDICT


@pytest.mark.parametrize(
    ("changes", "is_equal", "words"),
    [
        ({}, True, "equal: every loss of steps 3 to 9, 2 of them on channel B, is bit-equal on every rank"),
        (
            {"num_compared": 6, "difference": "step 9"},
            False,
            "differs: step 9; steps before it, all bit-equal: 6",
        ),
        (
            {"num_compared": 2},
            False,
            "not finished: steps from step 3 on, all bit-equal: 2; the record goes to step 9",
        ),
    ],
)
def test_a_verdict_is_a_status_and_a_sentence(
    tmp_path: Path, changes: dict[str, object], is_equal: bool, words: str
) -> None:
    verdict = replace(VERDICT, **changes)  # type: ignore[arg-type]
    assert verdict.is_equal is is_equal
    assert words in verdict.sentence
    verdict.write(tmp_path)
    assert read_verdict(tmp_path) == verdict
