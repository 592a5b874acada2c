from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import run
from swift_stage2.cli import ended
from swift_stage2.errors import ChildFailed


def command_line(words: list[str]) -> int:
    return ended("bench", lambda: run.main(words[1:]))


FAULT_BENCHES = ("faults", "kills", "outage", "soak")


@pytest.mark.parametrize("name", run.BENCHES)
def test_every_bench_has_a_command_line_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line(["bench", name, "--help"])
    told = capsys.readouterr().out
    assert f"swift-stage2 bench {name}" in told
    last = " ".join(told.split("\n\n")[-1].split())
    assert last.startswith("exit status: 0 ")
    assert "2 the user's mistake, told in one line" in last


@pytest.mark.parametrize("name", FAULT_BENCHES)
def test_an_unknown_server_is_refused_with_those_there_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line(["bench", name, "--server", "foo", "--output", str(tmp_path / "out")])
    assert "argument --server: must be one of transformers, stock, vllm, got 'foo'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [[], ["--keep"]])
@pytest.mark.parametrize("name", FAULT_BENCHES)
def test_a_file_is_no_place_for_results(
    name: str, keep: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert command_line(["bench", name, "--output", str(tmp_path / "file"), *keep]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--output must be a directory, got " in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", FAULT_BENCHES)
def test_the_help_says_where_results_go_what_a_server_needs_and_how_long_it_takes(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # nothing is broken in its middle
    with pytest.raises(SystemExit, match="0"):
        command_line(["bench", name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        f"(default runs/bench-{name})",
        "need vLLM",
        "(default transformers)",
        "minutes",
        "Exit status 0:",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("name", "least"), [("kills", "at least 1 "), ("outage", "at least 10 "), ("soak", "at least 76;")]
)
def test_the_help_tells_least_values(name: str, least: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line(["bench", name, "--help"])
    assert least in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "near"), [(["bench", "learnng"], "learning"), (["bench", "plan", "--rnaks", "2"], "--ranks")]
)
def test_a_misspelt_word_names_the_nearest(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line(words)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"; did you mean {near}?")


def test_an_unknown_bench_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["speed"])
    assert "learning" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "learning", "--steps", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_child_that_failed_is_one_line_and_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(run.BENCHES["overhead"][0])

    def fail(argv: object) -> int:
        raise ChildFailed("plain ended with status 1: no luck; see /tmp/log")

    monkeypatch.setattr(module, "main", fail)
    assert run.main(["overhead"]) == 1
    assert (
        capsys.readouterr().err
        == "swift-stage2 bench: error: plain ended with status 1: no luck; see /tmp/log\n"
    )
