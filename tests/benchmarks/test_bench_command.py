"""Every bench's command line has options within bounds, a place for results, mistakes told in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.benches import BENCHES, GROUPS, ROWS
from swift_stage2.cli import ended
from swift_stage2.errors import ChildFailed, UserError

FAULT_BENCHES = ("faults", "kills", "stops", "outage", "soak")
MISTAKES = {
    "plan --ranks 1": "--ranks must be at least 2, got 1; write 2",
    "plan --ranks 2 0": "--ranks must be at least 2, got 0; write 2",
    "plan --queue-limits 3": "--queue-limits must be at least 4, got 3; write 8 64 512",
    "plan --repeats 1": "--repeats must be at least 2, got 1; write 200",
    "preprocess --objects 0": "--objects must be at least 1, got 0",
    "preprocess --samples 0": "--samples must be at least 1, got 0",
    "preprocess --crowd 0": "--crowd must be at least 1, got 0; write 500",
    "preprocess --repeats 1": "--repeats must be at least 2, got 1; write 30",
    "interference --pairs 0": "--pairs must be at least 1, got 0; write 8",
    "interference --block-steps 15": "--block-steps must be at least 16, got 15; write 40",
    "interference --latency-s 0": "--latency-s must be above 0 and at most 10, got 0.0; write 0.5",
    "interference --preprocessing disk": "--preprocessing must name places, got 'disk'; choose among process, thread",
    "overlap --steps 15": "--steps must be at least 16, got 15; write 88",
    "overlap --repeats 0": "--repeats must be at least 1, got 0; write 3",
    "overlap --latency-s 11": "--latency-s must be above 0 and at most 10, got 11.0; write 0.5",
    "peer --steps 15": "--steps must be at least 16, got 15; write 72",
    "peer --repeats 0": "--repeats must be at least 1, got 0; write 3",
    "peer --latency-s nan": "--latency-s must be above 0 and at most 10, got nan; write 0.5",
    "overhead --steps 6": "--steps must be at least 7, got 6; write 60",
    "overhead --repeats 0": "--repeats must be at least 1, got 0; write 3",
    "overhead --ranks 0": "--ranks must be at least 1, got 0; write 2",
    "sync --mib 0": "--mib must be at least 1, got 0",
    "sync --repeats 0": "--repeats must be at least 1, got 0",
    "pending --steps 9": "--steps must be at least 10, got 9; write 60",
    "merge --repeats 0": "--repeats must be at least 1, got 0",
    "merge --requests 10 --ranks 4": "--requests must be a multiple of every number of ranks, got requests=10",
    "learning --steps 0": "--steps must be at least 1, got 0; write 200",
    "learning --seeds 0": "--seeds must be at least 1, got 0; write 1",
    "learning --b-ratios 0,x": "--b-ratios must be numbers with commas between, got '0,x'; write 0,0.3",
    "learning --b-ratios 0,1.5": "--b-ratios must be different numbers in the range 0..1, got '0,1.5'; write 0,0.3",
    "learning --b-ratios 0,0": "--b-ratios must be different numbers in the range 0..1, got '0,0'; write 0,0.3",
    "staleness --lags 0,-1": "--lags must be different numbers from 0 on, got '0,-1'; write 0,2,8",
    "staleness --lags 2,2": "--lags must be different numbers from 0 on, got '2,2'; write 0,2,8",
    "staleness --lags x": "--lags must be whole numbers with commas between, got 'x'; write 0,2,8",
    "staleness --seeds 0": "--seeds must be at least 1, got 0; write 3",
    "staleness --steps 39": "--steps must be at least 40 for a lag of 8 versions, got 39; write --steps 150",
    "staleness --lags 0,50": "--steps must be at least 208 for a lag of 50 versions, got 150; write --steps 208",
    "faults --rows poison,flood": f"--rows must name rows, got 'flood'; choose among {', '.join(ROWS)}",
    "faults --rows=": "--rows must name rows, got ''; choose among ",
    "kills --points 0": "--points must be at least 1, got 0; write 50",
    "outage --steps 9": "--steps must be at least 10, got 9; write 200",
    "outage --cycles 0": "--cycles must be at least 1, got 0; write 1",
    "outage --ranks 0": "--ranks must be at least 1, got 0; write 2",
    "outage --b-ratio 0": "--b-ratio must be above 0 and below 1, got 0.0; write 0.25",
    "outage --b-ratio nan": "--b-ratio must be above 0 and below 1, got nan; write 0.25",
    "outage --stand-in-latency-s 0": "--stand-in-latency-s must be above 0 and at most 10, got 0.0; write 0.5",
    "soak --steps 75": "--steps must be at least 76, got 75; write 2000",
    "soak --steps -5": "--steps must be at least 76, got -5; write 2000",
    "attacks --groups none": f"--groups must name groups, got 'none'; choose among {', '.join(GROUPS)}",
    "all --only speed": "--only must name benches, got 'speed'; choose among plan, preprocess",
    "all --only plan --skip plan": "--only and --skip must leave a bench to run",
    "all --write /no/such/place/page.md": "in a directory that is there",
    "all --write page.json": "ends in .md",
    f"all --write {Path(__file__).parents[2] / 'README.md'}": "one that bench all wrote",
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
def test_every_bench_tells_its_options_and_exit_statuses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main([name, "--help"])
    told = capsys.readouterr().out
    assert f"swift-stage2 bench {name}" in told
    last = " ".join(told.split("\n\n")[-1].split())
    assert last.startswith("exit status: 0 ")
    assert "2 the user's mistake, told in one line" in last


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_can_be_run(name: str) -> None:
    module = importlib.import_module(BENCHES[name].path)
    assert callable(module.run)


def test_help_is_told_without_loading_torch() -> None:
    program = (
        "import sys\nfrom benchmarks.benches import BENCHES\nfrom benchmarks.command import main\n"
        "for name in BENCHES:\n"
        "    try:\n        main([name, '--help'])\n    except SystemExit as end:\n        assert end.code == 0\n"
        "sys.exit('torch' if 'torch' in sys.modules else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FAULT_BENCHES)
def test_an_unknown_server_is_refused_with_those_there_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([name, "--server", "foo", "--output", str(tmp_path / "out")])
    assert "argument --server: must be one of transformers, stock, vllm, got 'foo'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", ["", " --keep"])
def test_a_file_is_no_place_for_results(
    keep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert line(f"kills --output {tmp_path / 'file'}{keep}") == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "--output must be a directory, got " in told
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="--output must be a new directory"):
        command.main(["soak", "--output", str(tmp_path)])


@pytest.mark.parametrize("name", FAULT_BENCHES)
def test_the_help_says_where_results_go_what_a_server_needs_and_how_long_it_takes(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # nothing is broken in its middle
    with pytest.raises(SystemExit, match="0"):
        command.main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    least = {"kills": "at least 1 ", "outage": "at least 10 ", "soak": "at least 76;"}.get(name, "")
    place = f"(default runs/bench-{name})"
    for words in (place, "need vLLM", "(default transformers)", "minutes", "Exit status 0:", least):
        assert words in text


@pytest.mark.parametrize(
    ("words", "near"), [("learnng", "learning"), ("plan --rnaks 2", "--ranks"), ("soak --stpes 9", "--steps")]
)
def test_a_misspelt_word_names_the_nearest(words: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        line(words)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"; did you mean {near}?")


def test_a_child_that_failed_is_one_line_and_status_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(BENCHES["overhead"].path)

    def fail(options: object, directory: Path) -> int:
        raise ChildFailed("plain ended with status 1: no luck; see /tmp/log")

    monkeypatch.setattr(module, "run", fail)
    assert line(f"overhead --output {tmp_path / 'out'}") == 1
    told = "swift-stage2 bench: error: plain ended with status 1: no luck; see /tmp/log\n"
    assert capsys.readouterr().err == told
