"""The bench of attacks: one table of all groups, and an exit status that tells what was not withstood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.attacks import answers
from benchmarks.attacks.run import AttackResult


@pytest.mark.parametrize(("end", "status"), [("fault", 0), ("traceback", 1), ("hang", 1), ("accepted", 1)])
def test_the_exit_status_tells_a_forbidden_outcome(
    end: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = AttackResult("odd", 3, {"record": 2, end: 1}, peak_mib=5.5, seconds=20.2)
    monkeypatch.setattr(answers, "attacks", lambda: [found])
    assert command.main(["attacks", "--groups", "answers", "--output", str(tmp_path / "out")]) == status
    printed = capsys.readouterr().out
    assert "answers: odd" in printed
    assert f"3 tries, {status} attack(s) not withstood" in printed
    facts = json.loads((tmp_path / "out" / "attacks.json").read_text())
    assert facts["answers"][0]["outcomes"] == {"record": 2, end: 1}


def test_every_try_has_one_outcome() -> None:
    with pytest.raises(ValueError, match="attempts=2"):
        AttackResult("odd", 2, {"fault": 1})


def test_a_few_odd_answers_are_withstood() -> None:
    results = answers.odd_answers(60)
    assert {result.name for result in results} >= {"odd answers to the client", "odd answers to the threads"}
    assert [result.forbidden for result in results if result.forbidden] == []
