"""``scripts/test`` installs what its tests need, and says so where it has to leave some out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("has_browser", [True, False])
def test_browser_tests_run_or_are_named_as_left_out(tmp_path: Path, has_browser: bool, status: int) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "test", tmp_path / "scripts" / "test")
    # Stand-ins that write their arguments down: an installation takes minutes and changes the machine.
    setup = f'echo "setup $*" >>asked\n[[ ${{1-}} != --browser ]] || exit {0 if has_browser else 2}\n'
    for name, text in {
        "scripts/setup": setup,
        ".venv/bin/python": f'echo "$*" >>asked\nexit {status}\n',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts" / "test", "-k", "x"], capture_output=True, text=True, timeout=60, check=False
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    left_out = [] if has_browser else ["-m not browser"]
    assert asked == [
        "setup ",
        "setup --browser",
        " ".join(["-m pytest -q --ignore tests/vllm", *left_out, "-k x"]),
    ]
    assert done.returncode == status
    assert ("left out: the tests marked browser" in done.stdout) is not has_browser


def test_ci_runs_only_the_commands_of_the_contributors_page() -> None:
    """What CI installs by itself would be missing on a fresh machine."""
    commands = [
        line.removesuffix(" </dev/null")
        for line in (PROJECT / ".ci" / "run").read_text().splitlines()
        if line.startswith("scripts/")
    ]
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    assert commands == ["scripts/check", "scripts/test", "scripts/test --vllm"]
    assert all(
        command.split()[0] in page and command.split()[-1].split("/")[-1] in page for command in commands
    )
