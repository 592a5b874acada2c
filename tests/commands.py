"""Programs that a test runs to their end, in a process of their own, with what they said as text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

END_S = 120.0
"""Longest time of a program that says nothing of its own."""


def run_python(
    *arguments: str | Path, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """This Python with some arguments, and some variables beside those of this process.

    ``options`` are those of ``subprocess.run``.
    """
    given = {"capture_output": True, "text": True, "timeout": END_S} | options
    if variables is not None:
        given["env"] = os.environ | dict(variables)
    found: subprocess.CompletedProcess[str] = subprocess.run([sys.executable, *map(str, arguments)], **given)
    return found


def run_command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``swift-stage2`` with some arguments."""
    return run_python("-m", "swift_stage2", *arguments, **options)


@contextmanager
def speaking(*arguments: str | Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python with this one's modules, and the first line that it says; killed at the end, even if frozen."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(END_S)
        process.stdout.close()
