"""The run directory of a launch that has ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swift_stage2.launch.launcher import newest_run


@pytest.mark.parametrize("folder", [".", "v1-20260101"])
def test_the_newest_run_is_the_launchs_unless_it_is_an_earlier_one(tmp_path: Path, folder: str) -> None:
    for moment, run_dir in ((1.0, tmp_path / "v0-20250101"), (5.0, tmp_path / folder)):
        assert newest_run(tmp_path, 2.0) is None
        run_dir.mkdir(exist_ok=True)
        (run_dir / "args.json").touch()
        os.utime(run_dir / "args.json", (moment, moment))
    assert newest_run(tmp_path, 2.0) == tmp_path / folder
