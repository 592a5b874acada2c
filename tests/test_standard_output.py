"""Commands whose output nobody reads: a real process, and a pipe whose reading end is closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_run import LedgerRun

CUT = -signal.SIGPIPE


def run_unread(*arguments: str, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    return python_unread("-m", "swift_stage2", *arguments, unbuffered=unbuffered)


def python_unread(*arguments: str, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            env=environment | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {}),
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_report_that_nobody_reads_is_cut_quietly(tmp_path: Path, unbuffered: bool) -> None:
    """By the signal, as any command in a pipe; 1 would say that it is not balanced."""
    LedgerRun(tmp_path).train_drawn(2)
    ended = run_unread("report", str(tmp_path), unbuffered=unbuffered)
    assert (ended.returncode, ended.stderr) == (CUT, "")


def test_print_is_cut_quietly_as_well(tmp_path: Path) -> None:
    LedgerRun(tmp_path).train_drawn(2)
    ended = run_unread("report", str(tmp_path), "--json", unbuffered=True)
    assert (ended.returncode, ended.stderr) == (CUT, "")


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("doctor", "--help")])
def test_a_command_that_outlives_its_output_keeps_its_status(
    arguments: tuple[str, ...], unbuffered: bool
) -> None:
    """Not the interpreter's 120 for what it could not flush."""
    ended = run_unread(*arguments, unbuffered=unbuffered)
    assert (ended.returncode, ended.stderr) == (0, "")


def config_of_a_run(directory: Path) -> Path:
    """Of a model that looks like one."""
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    file = directory / "run.yaml"
    file.write_text(
        f"swift: {{output_dir: out, model: {directory}}}\nstage2_ab: {{schedule: {{b_ratio: 0}}}}\n"
    )
    return file


def test_a_run_goes_on_without_a_reader_and_keeps_its_status(tmp_path: Path) -> None:
    file = config_of_a_run(tmp_path)
    code = (
        "import sys, types\n"
        "from swift_stage2 import cli\n"
        "module = types.ModuleType('swift_stage2.training.sft')\n"
        "module.train = lambda config, **_: print('step 1') or 7\n"
        "sys.modules[module.__name__] = module\n"
        f"sys.exit(cli.main(['train', {str(file)!r}]))\n"
    )
    ended = python_unread("-c", code)
    assert (ended.returncode, ended.stderr) == (7, "")
