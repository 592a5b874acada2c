"""``swift-stage2 report`` on ledgers that the real writer left: what is printed, and the exit status."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from ledger_run import LedgerRun
from run_files import RunFiles, balanced_ledger

from swift_stage2.cli import main
from swift_stage2.records import ReturnReason
from swift_stage2.report.command import report_of
from swift_stage2.report.content import Table
from swift_stage2.report.run_data import read_run
from swift_stage2.report.steps import account_section
from swift_stage2.runtime.run_directory import run_lock
from swift_stage2.telemetry.event_log import ranks_of
from swift_stage2.telemetry.events import Quarantined


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[LedgerRun]:
    ranks = [LedgerRun(tmp_path, rank=rank, world_size=2, num_rows=21) for rank in (0, 1)]
    for run in ranks:
        run.train_drawn(2)
        (late, bad) = run.draw(2)
        run.source.give_back([late], ReturnReason.OVERFLOW)
        run.source.settle_quarantined(bad, "too_slow", "three times")
    return ranks


@pytest.mark.usefixtures("two_ranks")
def test_a_sound_run_is_balanced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "balanced: every sample drawn was trained once, quarantined, or is in hand" in text
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["0", "4", "2", "1", "1", "0", "0"] in cells
    assert ["all", "8", "4", "2", "2", "0", "0"] in cells
    assert ["overflow", "2"] in cells
    assert ["to be redrawn", "2"] in cells


def test_a_sample_trained_twice_is_named_and_told_by_the_status(
    tmp_path: Path, two_ranks: list[LedgerRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = two_ranks[1]
    keys = run.train_drawn(3)
    run.train(keys)
    assert main(["report", str(tmp_path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"rank 1: no sample is trained twice: 0:{keys[0].position}:{keys[0].index}" in text
    assert "not balanced, broken rules: 2" in text  # the sum does not add up either


def test_a_damaged_line_is_not_provable(
    tmp_path: Path, two_ranks: list[LedgerRun], capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_ranks[0].path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], lines[-1][:9], b"\n", lines[-1]]))
    assert main(["report", str(tmp_path)]) == 1
    assert "not provable: damaged lines: 1" in " ".join(capsys.readouterr().out.split())


def test_a_killed_process_leaves_a_balanced_account(tmp_path: Path, two_ranks: list[LedgerRun]) -> None:
    os.truncate(two_ranks[0].path, two_ranks[0].path.stat().st_size - 7)
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["absent", "."])
def test_no_such_run_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-stage2 report: error: a run's directory holds events/rank*.jsonl, got ")
    assert "telemetry.audit: true" in line


@pytest.mark.parametrize("given", ["a b", "a b c", "c a b", "a a"])
def test_unrelated_runs_are_refused(tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        RunFiles(tmp_path / name).start().train(2).end()
    assert main(["report", *(str(tmp_path / name) for name in given.split())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"got {tmp_path / given.split()[1]}, which resumed none of them" in line
    assert "run report on each, and swift-stage2 evaluate --compare" in line


def test_a_run_is_running_killed_or_ended_in_order(tmp_path: Path) -> None:
    run = balanced_ledger(tmp_path)
    told = []
    for has_ended, is_held in ((False, True), (False, False), (True, False)):
        if has_ended:
            run.end()
        with run_lock(tmp_path) if is_held else nullcontext():
            found = report_of(read_run([tmp_path]))
        told.append(found.state.rpartition("; ")[2])
        (ledger,) = (section for section in found.sections if section.key == "ledger")
        assert ("no end is told yet" in str(ledger)) is not has_ended
    assert told == ["running", "was killed", "ended in order"]


def given_up(run: LedgerRun) -> list[Table]:
    section = account_section(None, ranks_of({0: run.events()}).values())
    return [part for part in section.parts if isinstance(part, Table)]


def test_samples_given_up_are_told_by_file_line_image_and_message(tmp_path: Path) -> None:
    run = LedgerRun(tmp_path)
    assert given_up(run) == []
    places = [{"file": "rows.jsonl", "line": 13, "images": ("/a.png", None)}] * 2 + [{}]
    for place in places:
        told = {"samples": ((0, 0, 7, 0),), "reason": "bad_sample", "message": "no box"}
        run.log.write(Quarantined(**told, **place))  # type: ignore[arg-type]
    (table,) = given_up(run)
    assert table.rows == (
        ("rows.jsonl:13", "/a.png", "bad_sample", "2", "no box"),
        ("row 7 of ms-swift's set", "", "bad_sample", "1", "no box"),
    )
