"""torchvision's import state belongs to the process, so the real cases run in fresh interpreters."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swift_stage2.compat import torchvision_on_cpu as cpu_torchvision


def _run(script: str, *, first_on_path: Path | None = None) -> str:
    path = [str(first_on_path)] if first_on_path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_and_what_needs_it_import_and_transform() -> None:
    script = """
from swift_stage2.compat.torchvision_on_cpu import declare_operators
declare_operators()
declare_operators()
import torch, torchvision, qwen_vl_utils
declare_operators()
print(tuple(torchvision.transforms.functional.resize(torch.zeros(3, 4, 6), [2, 3]).shape))
"""
    assert _run(script) == "(3, 2, 3)"


@pytest.mark.parametrize("fits", [True, False])
def test_declares_only_where_the_own_library_does_not_load(tmp_path: Path, fits: bool) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    if fits:  # any shared library that loads in this interpreter stands for a build that fits
        loadable = importlib.util.find_spec("markupsafe._speedups")
        assert loadable is not None
        assert loadable.origin is not None
        shutil.copy(loadable.origin, package / "_C.so")
    else:
        (package / "_C.so").write_bytes(b"not a library for this torch")
    script = """
from swift_stage2.compat.torchvision_on_cpu import declare_operators
declare_operators()
import torch, torchvision
print(torchvision.__file__)
print(hasattr(torch.ops.torchvision, "nms"))
"""
    file, declared = _run(script, first_on_path=tmp_path).splitlines()
    assert file == str(package / "__init__.py")
    assert declared == str(not fits)


def test_nothing_happens_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = list(cpu_torchvision._declared)
    cpu_torchvision.declare_operators()
    assert cpu_torchvision._declared == before
