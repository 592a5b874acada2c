from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swift_stage2.cli import main as command_line
from swift_stage2.config import load_config
from swift_stage2.demo.demo_config import held_ports

NUM_STEPS = 24
PATIENCE_S = 500.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--steps", "0"], "--steps must be at least 1, got steps=0"),
        (["--seed", "-1"], "--seed must be at least 0, got seed=-1"),
        (["--b-ratio", "1.2"], "--b-ratio must be in the range 0..1, got b_ratio=1.2"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert command_line(["demo", *options, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_vllm_a_demo_on_it_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    assert command_line(["demo", "--engine", "swift", "--output", str(tmp_path / "out")]) == 2
    assert "a server on vLLM needs vllm, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_is_told_without_loading_torch() -> None:
    program = (
        "import sys\n"
        "from swift_stage2.cli import main\n"
        "try:\n    main([sys.argv[1], *sys.argv[2:], '--help'])\n"
        "except SystemExit as end:\n    sys.exit('torch' if 'torch' in sys.modules else end.code)\n"
    )
    for command in (["demo"], ["rollout"], ["merge"], ["doctor"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stderr)


def test_other_peoples_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert command_line(["demo", "--output", str(tmp_path)]) == 2
    assert "with other files" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The real thing, short: two ranks, the rollout server, the launcher."""
    directory = tmp_path_factory.mktemp("demo") / "out"
    options = ("--steps", str(NUM_STEPS), "--output", str(directory))
    command = (sys.executable, "-m", "swift_stage2", "demo", *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S), directory


@pytest.mark.timeout(PATIENCE_S)
def test_the_demo_trains_on_both_channels_and_says_so(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = finished
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert done.stderr == ""
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in done.stdout
    channels = re.findall(r"channel ([AB]+)", done.stdout)
    assert "B" in channels[-1]
    for title in ("Steps", "Sync rounds", "seconds by activity", "Held-out detection, 128 scenes"):
        assert title in done.stdout
    # Too short a run to ask for a share of B; everything else must be as it should.
    problems = [line for line in done.stdout.splitlines() if line.startswith("!")]
    assert all(line.startswith("! channel B must run") for line in problems)
    assert (done.returncode == 0) is (not problems)


@pytest.mark.timeout(PATIENCE_S)
def test_what_it_leaves_is_a_run_that_can_be_looked_at_and_repeated(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, directory = finished
    config = load_config(directory / "config.yaml")
    assert config.swift["max_steps"] == NUM_STEPS
    assert (directory / "run" / f"checkpoint-{NUM_STEPS}" / "model.safetensors").is_file()
    assert len(json.loads((directory / "scores.json").read_text())) == 2
    assert list((directory / "run" / "runs").glob("events.out.tfevents.*"))


@pytest.mark.timeout(PATIENCE_S)
def test_no_process_and_no_port_is_left(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, directory = finished
    assert "Left behind: no process, no port." in done.stdout
    server = load_config(directory / "config.yaml").rollout.servers[0]
    assert held_ports((server.port, server.group_port)) == []
    mentions = [process for process in psutil.process_iter(["cmdline"]) if _mentions(process, str(directory))]
    assert mentions == []


def _mentions(process: psutil.Process, text: str) -> bool:
    return any(text in word for word in process.info["cmdline"] or ())
