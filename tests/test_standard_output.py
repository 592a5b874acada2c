"""Commands whose output nobody reads: a real process, and a pipe whose reading end is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_run import LedgerRun

_SHOW = """
import sys
from swift_stage2 import cli
sys.exit(cli.ended("launch", lambda: [cli._show("a line") for _ in range(3)] and 7))
"""


@pytest.mark.parametrize("is_run", [False, True])
def test_what_only_prints_is_cut_quietly_and_a_run_goes_on(tmp_path: Path, is_run: bool) -> None:
    LedgerRun(tmp_path).train_drawn(2)
    reading, writing = os.pipe()
    os.close(reading)
    words = ["-c", _SHOW] if is_run else ["-m", "swift_stage2", "report", str(tmp_path), "--json"]
    try:
        ended = subprocess.run(
            [sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (7 if is_run else 1, "")
