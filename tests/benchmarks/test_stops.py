"""A real two-rank run asked to end in three ways at three moments, with data-loader workers, and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_a_run_that_is_asked_to_end_is_saved_and_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """A process of its own, because the bench adopts orphans and takes signals."""
    command = [
        sys.executable,
        "-m",
        "swift_stage2",
        "bench",
        "stops",
        "--points",
        "3",
        "--output",
        str(tmp_path / "out"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1600, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "stops.json").read_text(encoding="utf-8"))
    assert [cell[:3] for cell in found] == [
        ["Ctrl-C to launch", "first step", "1 (default)"],
        ["SIGTERM to launch", "round", "4"],
        ["SIGTERM to torchrun", "save", "4, persistent"],
    ]
