"""Every bench's command line has options within bounds, a place for results, mistakes told in one line."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.benches import BENCHES
from swift_stage2.cli import ended
from swift_stage2.errors import UserError

MISTAKES = {
    "plan --ranks 2 0": "--ranks must be at least 2, got 0; leave it out for the default",
    "peer --latency-s nan": "--latency-s must be at least 0.001 and at most 10, got nan; ",
    "learning --arms a b1.5": "--arms must be a, once, renewN, bR, bR/grpo, bR/mixed, first or firstN, each",
    "staleness --steps 39": "--steps must be at least 40 for a lag of 8 versions, got 39; write --steps 40",
}


def line(words: str) -> int:
    return ended("bench", lambda: command.main(words.split()))


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_told_in_one_line_before_anything_is_written(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line(f"{words} --output {tmp_path / 'out'}") == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("swift-stage2 bench: error: ")
    assert MISTAKES[words] in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_tells_its_options_and_exit_statuses_and_can_be_run(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main([name, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"swift-stage2 bench {name}" in told
    assert f"(default runs/bench-{name})" in told
    assert "exit status: 0 " in told
    assert callable(importlib.import_module(BENCHES[name].path).run)


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="--output must be a new directory"):
        command.main(["plan", "--output", str(tmp_path)])
