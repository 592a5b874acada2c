"""The sets of versions in constraints/ resolve, and are whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize(
    "constraints", sorted((PROJECT / "constraints").glob("*.txt")), ids=lambda each: each.stem
)
def test_constraints_pin_all_that_a_machine_with_gpus_installs(constraints: Path, python: str) -> None:
    """It reads the index's metadata and downloads no package. The set is that of Python 3.11."""
    resolve = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    machine = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    wanted = ["--extra", "server", "--extra", "gpu", "--extra", "deepspeed", "setup.cfg"]
    resolved = subprocess.run(
        [*resolve, *machine, *wanted, "--constraint", str(constraints)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert resolved.returncode == 0, resolved.stderr
    pins = [line for line in constraints.read_text().splitlines() if not line.startswith("#")]
    found = resolved.stdout.splitlines()
    assert found == pins if python == "3.11" else set(found) <= set(pins)
