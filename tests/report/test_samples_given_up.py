"""A report names the samples that were given up by file, line and image, whatever else stands in the audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ledger_run import LedgerRun

from swift_stage2.channel_b.records import SampleKey
from swift_stage2.channel_b.row_origins import RowOrigin
from swift_stage2.cli import main
from swift_stage2.report.account import account_section
from swift_stage2.report.content import Table
from swift_stage2.telemetry import AuditLog
from swift_stage2.telemetry.audit import audit_path
from swift_stage2.telemetry.rank_records import RankRecords


def test_a_report_names_file_line_image_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LedgerRun(tmp_path)
    (bad,) = run.draw(1)
    run.source.settle_quarantined(bad, "bad_sample", "no box")
    audit = AuditLog(audit_path(tmp_path, 0))
    origin = RowOrigin("rows.jsonl", 13, ("/a.png",))
    for _ in range(2):
        audit.write(
            "quarantine",
            sample=bad,
            reason="bad_sample",
            message="no box",
            file=origin.file,
            line=origin.line,
            images=origin.images,
        )
    audit.close()
    main(["report", str(tmp_path)])
    text = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    assert ["rows.jsonl:13", "/a.png", "bad_sample", "2", "no box"] in cells


def given_up(*quarantines: dict[str, Any]) -> list[Table]:
    records = RankRecords(0)
    for record in quarantines:
        records.take({"kind": "quarantine"} | record)
    parts = account_section(None, [records], had_no_b=False).parts
    return [part for part in parts if isinstance(part, Table)]


def test_records_without_a_place_name_the_row_of_the_set() -> None:
    (table,) = given_up(
        {"sample": {"index": 7}, "reason": "too_slow", "message": "late"}, {"images": 7, "sample": None}
    )
    assert table.rows == (
        ("row 7 of ms-swift's set", "", "too_slow", "1", "late"),
        ("row ? of ms-swift's set", "", "", "1", ""),
    )
    assert given_up() == []


def test_many_places_are_bounded() -> None:
    (table,) = given_up(
        *({"sample": SampleKey(0, line, line), "file": "a.jsonl", "line": line} for line in range(500))
    )
    assert (len(table.rows), table.title) == (100, "Samples given up: 100 of 500 places")
