from __future__ import annotations

import importlib

import pytest

from swift_stage2.bench import run
from swift_stage2.cli import main as command_line
from swift_stage2.errors import ChildFailed


@pytest.mark.parametrize("name", run.BENCHES)
def test_every_bench_has_a_command_line_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line(["bench", name, "--help"])
    assert f"swift-stage2 bench {name}" in capsys.readouterr().out


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
