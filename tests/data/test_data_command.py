"""``swift-stage2 data check`` as its users call it: in a process of its own, with its exit status and its words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run_command, run_python
from row_files import make_image, make_row, write_rows

from swift_stage2.data.survey import main

PATIENCE_S = 120


@pytest.fixture
def good(tmp_path: Path) -> Path:
    image = make_image(tmp_path / "a.png")
    return write_rows(tmp_path / "good.jsonl", [make_row(image)] * 3)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    image = make_image(tmp_path / "b.png")
    return write_rows(tmp_path / "bad.jsonl", [make_row(image)] * 2 + [make_row(image, answer="A cat.")] * 30)


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_command("data", "check", *map(str, arguments), timeout=PATIENCE_S)


def test_faults_end_with_1_and_are_listed_with_their_number(good: Path, bad: Path) -> None:
    done = _run(good, bad)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "fault: answer lists its objects: 30 of 35 rows"
    assert [line.split(": ")[0].strip() for line in lines[1:21]] == [f"{bad}:{line}" for line in range(3, 23)]
    assert lines[21] == "  … and 10 more"
    assert lines[-1].endswith(": 30 have faults")
    assert len(_run(good, bad, "--all").stdout.splitlines()) == len(lines) + 10 - 1


BARE = {"objects": None, "messages": make_row("", answer="A room.")["messages"]}


@pytest.mark.parametrize(
    ("changes", "options", "status", "told"),
    [
        ({}, (), 0, "1 rows of 1 file(s), every one checked: no fault"),
        (
            {"images": ["turned.jpg"]},
            (),
            0,
            "advice: EXIF orientation: 1 of 1 rows\n  {file}:1: an image should",
        ),
        (BARE, (), 1, "fault: objects: 1 of 1 rows"),
        (BARE, ("--rows-without-objects",), 0, ": no fault\n"),
        (BARE, ("--task", "counting"), 0, "images; objects and answers of task counting were not checked\n"),
        (BARE | {"images": ["gone.png"]}, ("--task", "counting"), 1, "image readable"),
        ({}, ("--task", "mine", "--dialect", "point_list"), 1, "a point must be two numbers"),
        ({}, ("--dialect", "point_list"), 1, "a point must be two numbers"),
        ({}, ("--dialect", "yaml"), 2, "invalid choice: 'yaml'"),
        ({}, ("absent.jsonl",), 2, "a data set must be a readable UTF-8 file, got absent.jsonl"),
        ({}, ("/",), 2, "a data set must be a readable UTF-8 file, got /"),
        (None, (), 2, "a data set must hold rows"),
    ],
)
def test_status_and_words(
    tmp_path: Path, changes: dict[str, Any] | None, options: tuple[str, ...], status: int, told: str
) -> None:
    row = make_row(make_image(tmp_path / "a.png")) | (changes or {})
    make_image(tmp_path / "turned.jpg", orientation=8)
    row = {name: value for name, value in row.items() if value is not None}
    file = write_rows(tmp_path / "rows.jsonl", ["" if changes is None else row])
    done = run_command("data", "check", str(file), *options, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == status
    assert told.format(file=file) in (done.stderr if status == 2 else done.stdout)
    assert "Traceback" not in done.stderr
    assert status == 2 or not done.stderr


def test_nothing_slow_is_imported(good: Path) -> None:
    code = (
        "import sys; from swift_stage2.cli import main; status = main(['data', 'check', sys.argv[1]]);"
        "print({'torch', 'numpy', 'transformers', 'swift'} & set(sys.modules), status)"
    )
    done = run_python("-c", code, str(good), timeout=PATIENCE_S, check=True)
    assert done.stdout.splitlines()[-1] == "set() 0"


def test_a_terminal_shows_how_far_it_is(
    good: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["check", str(good)]) == 0
    assert "rows" in capsys.readouterr().err
