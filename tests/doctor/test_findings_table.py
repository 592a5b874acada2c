"""The table is readable at 80 and 120 columns, whole, and counts its verdicts."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from swift_stage2.doctor.command import findings_json, findings_table, summary_line
from swift_stage2.doctor.examination import Finding, Verdict

FINDINGS = [
    Finding("Configuration", "configuration loads", Verdict.OK, "run.yaml: b_ratio 0.25, 2 server(s)"),
    Finding(
        "Configuration", "useful limit", Verdict.WARNING, "queue_limit=[8] " * 12, "write queue_limit: 6"
    ),
    Finding("Server 0: http://127.0.0.1:8000", "route", Verdict.FAILED, "nothing answers", "start it", True),
    Finding(
        "Server 0: http://127.0.0.1:8000", "model served", Verdict.NOT_CHECKED, "because of: route", "", True
    ),
]


def screen(width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(findings_table(FINDINGS))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off_and_no_line_is_too_long(width: int) -> None:
    text = screen(width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    words = " ".join(text.split())
    for part in (
        "fix: start it",
        "fix: write queue_limit: 6",
        "not checked: because of: route",
        "nothing answers",
    ):
        assert part in words
    assert words.count("queue_limit=[8]") == 12, "brackets are text here, not markup"


def test_a_sections_heading_stands_once_above_its_rows() -> None:
    lines = screen(80).splitlines()
    assert [line.strip() for line in lines].count("Server 0: http://127.0.0.1:8000") == 1


def test_verdicts_are_counted() -> None:
    assert summary_line(FINDINGS).plain == "1 ok, 1 warning, 1 failed, 1 not checked"


def test_json_has_every_field_of_a_row() -> None:
    data = json.loads(json.dumps(findings_json(FINDINGS, exit_status=1)))
    assert data["exit_status"] == 1
    assert data["findings"][2] == {
        "section": "Server 0: http://127.0.0.1:8000",
        "check": "route",
        "verdict": "failed",
        "found": "nothing answers",
        "fix": "start it",
        "counts_as_failed": True,
    }
