"""The page and the terminal of whole runs: the same numbers, nothing from outside, nothing that a text can break."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path

import pytest
from run_files import RunFiles, picture

from swift_stage2.cli import main
from swift_stage2.report.command import RunReport, report_of
from swift_stage2.report.content import Sentence, Table, page_of
from swift_stage2.report.run_data import read_run

SECTIONS = [
    "verdict",
    "steps",
    "time",
    "queue",
    "rounds",
    "quality",
    "detection",
    "suspects",
    "ledger",
    "gallery",
]
EVIL = "</script><script>window.broken = 1</script><img src=x onerror=window.broken=1>"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with everything."""
    run = RunFiles(tmp_path)
    run.start().train(20).evaluate().train(20).evaluate()
    image = picture(tmp_path / "images" / "street.png")
    for number, version in enumerate((1, 1, 3)):
        run.match([number, 0, 4, 0], version=version, images=[image])
    run.match([9, 0, 4, 0], version=4, images=[image], pairs=[])
    run.end()
    return tmp_path


def report(run_dir: Path) -> RunReport:
    return report_of(read_run([run_dir]))


def sentences(found: RunReport, key: str) -> str:
    (section,) = (section for section in found.sections if section.key == key)
    return " ".join(part.text for part in section.parts if isinstance(part, Sentence))


def test_every_number_of_the_terminal_is_on_the_page(run_dir: Path) -> None:
    found = report(run_dir)
    assert [section.key for section in found.sections] == SECTIONS
    text = html.unescape(page_of(found))
    for section in found.sections:
        for part in section.parts:
            match part:
                case Sentence():
                    assert part.text in text
                case Table():
                    assert all(cell in text for row in part.rows for cell in row)


def test_the_command_writes_the_page_and_prints_the_same(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "speed-up" in out
    assert "balanced: every sample drawn was trained once" in out
    assert "page: " in out
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in run_dir.glob(".report*")] == []


def test_the_verdict_is_that_of_the_known_times(run_dir: Path) -> None:
    speed = report(run_dir).speed
    assert speed is not None
    # 20 A and 19 timed B steps, 10 rounds; 19 packs of 0.35 s: the last step of all, a B step, is not timed.
    assert speed.steps_s == pytest.approx(20 * 0.2 + 19 * 0.4)
    assert speed.rounds_s == pytest.approx(10 * 0.3)
    assert speed.rollouts_s == pytest.approx(19 * 0.35)
    assert speed.learner_binds
    assert speed.facts["fraction"] == pytest.approx(14.6 / (14.6 + 12 * 0.05))


def test_another_place_and_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--json"]) == 0
    assert not (run_dir / "report.html").exists()
    found = json.loads(capsys.readouterr().out)
    assert (found["balanced"], found["provable"], found["violations"]) == (True, True, [])
    assert [rank["drawn"] for rank in found["ranks"]] == [20]
    assert found["speed"]["fraction"] == pytest.approx(0.9605, abs=1e-4)
    assert list(found["sections"]) == SECTIONS
    output = run_dir / "other.html"
    assert main(["report", str(run_dir), "--json", "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out)
    assert "4 of 4 matches" in output.read_text()


def test_a_page_that_cannot_be_written_costs_no_table(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(run_dir))
    assert main(["report", str(run_dir), "--output", str(run_dir / "events")]) == 2
    captured = capsys.readouterr()
    assert "balanced" in captured.out
    (line,) = captured.err.splitlines()
    assert "--output" in line
    assert sorted(os.listdir(run_dir)) == before


@pytest.mark.parametrize("place", ["label", "images", "rollout", "target", "dropped"])
def test_a_text_of_a_model_or_a_data_set_stays_text(tmp_path: Path, place: str) -> None:
    run = RunFiles(tmp_path)
    run.start().train(4)
    values = {"images": [EVIL], "dropped": {EVIL: 1}}.get(place, EVIL)
    for version in (1, 2):
        run.match([0, version, 1, 0], version=version, **{place: values})  # type: ignore[arg-type]
    run.end()
    text = page_of(report(tmp_path))
    assert "<script" not in text
    assert "onerror=window" not in text.replace("&lt;img src=x onerror=window", "")


def test_nothing_is_loaded_from_outside(run_dir: Path) -> None:
    text = page_of(report(run_dir))
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:)", text) == []
    assert "default-src 'none'" in text
    assert all(word not in text for word in ("<script", "url(", "@import"))


def test_a_run_without_channel_b_is_told_as_such(tmp_path: Path) -> None:
    RunFiles(tmp_path).start(queue_limit=None).train(12, with_b=False).end()
    assert main(["report", str(tmp_path)]) == 0
    found = report(tmp_path)
    assert "no step on channel B was timed" in sentences(found, "verdict")
    assert "no sample to account for" in sentences(found, "ledger")
    empty = [section.key for section in found.sections if not section.parts]
    assert empty == ["queue", "rounds", "quality", "detection", "suspects", "gallery"]
    assert "Sync rounds" not in page_of(found)


def test_a_run_that_ended_before_its_first_step_is_a_report(tmp_path: Path) -> None:
    RunFiles(tmp_path).start()
    assert main(["report", str(tmp_path)]) == 0
    found = report(tmp_path)
    assert "No speed-up can be told: no step was timed" in sentences(found, "verdict")
    assert page_of(found)


def test_evaluations_are_told_with_how_they_ended(run_dir: Path) -> None:
    (section,) = (section for section in report(run_dir).sections if section.key == "quality")
    (table,) = (part for part in section.parts if isinstance(part, Table) and "evaluations" in part.title)
    assert [row[:5] for row in table.rows] == [
        ("20", "5", "1 of 2", "0.5", "0.25"),
        ("40", "10", "1 of 2", "0.5", "0.25"),
    ]
    assert table.rows[0][-1] == "round_due"
