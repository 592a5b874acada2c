"""``swift-stage2 data check`` as its users call it: in a process of its own, with its exit status and its words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command, run_python
from row_files import make_image, make_row, write_rows

from swift_stage2.data.check_command import main

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


def test_a_clean_file_ends_with_0_and_a_verdict(good: Path) -> None:
    done = _run(good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("3 rows of 1 file(s), every one checked, in ")
    assert done.stdout.splitlines()[-1].endswith(": no fault")


def test_faults_end_with_1_and_are_listed_with_their_number(good: Path, bad: Path) -> None:
    done = _run(good, bad)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "fault: answer lists its objects: 30 of 35 rows"
    assert [line.split(": ")[0].strip() for line in lines[1:21]] == [f"{bad}:{line}" for line in range(3, 23)]
    assert lines[21] == "  … and 10 more"
    assert lines[-1].endswith(": 30 have faults")
    assert len(_run(good, bad, "--all").stdout.splitlines()) == len(lines) + 10 - 1


def test_advice_alone_ends_with_0(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [make_row(make_image(tmp_path / "a.jpg", orientation=8))])
    done = _run(file)
    assert done.returncode == 0
    assert done.stdout.startswith("advice: EXIF orientation: 1 of 1 rows\n")
    assert f"{file}:1: an image should carry no EXIF rotation, got orientation=8" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: FILE.jsonl"),
        (["absent.jsonl"], "a data set must be a readable UTF-8 file, got absent.jsonl"),
        (["/"], "a data set must be a readable UTF-8 file, got /"),
        (["a.jsonl", "--dialect", "yaml"], "invalid choice: 'yaml'"),
    ],
)
def test_a_call_that_cannot_be_used_ends_with_2(arguments: list[str], words: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_of_another_task_are_judged_by_form_and_images_alone(tmp_path: Path) -> None:
    row = make_row(make_image(tmp_path / "a.png"), answer="3")
    del row["objects"]
    file = write_rows(tmp_path / "rows.jsonl", [row])
    done = _run(file, "--task", "counting")
    assert done.returncode == 0
    assert done.stderr == ""
    verdict = ": no fault in form and images; objects and answers of task counting were not checked\n"
    assert done.stdout.endswith(verdict)
    (tmp_path / "a.png").unlink()
    done = _run(file, "--task", "counting")
    assert done.returncode == 1
    assert "image readable" in done.stdout


def test_a_dialect_says_what_rows_of_a_users_task_hold(tmp_path: Path) -> None:
    rows = [make_row(make_image(tmp_path / "a.png"), boxes=[[100, 9]])]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    assert _run(file, "--task", "mine").returncode == 0
    told = _run(file, "--task", "mine", "--dialect", "point_list")
    assert told.returncode == 1
    assert "a point must lie inside its image" in told.stdout
    refused = _run(file, "--dialect", "point_list")
    assert refused.returncode == 2
    assert "--dialect must be one of task detection, got dialect=point_list" in refused.stderr


def test_rows_for_channel_a_alone_are_allowed_where_asked_for(tmp_path: Path) -> None:
    row = make_row(make_image(tmp_path / "a.png"), answer="A room.")
    del row["objects"]
    file = write_rows(tmp_path / "rows.jsonl", [row])
    assert _run(file).returncode == 1
    assert _run(file, "--rows-without-objects").returncode == 0


def test_an_empty_file_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    done = _run(tmp_path / "empty.jsonl")
    assert done.returncode == 2
    assert "a data set must hold rows" in done.stderr


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
