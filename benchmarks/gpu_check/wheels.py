"""The packages that a machine with nothing but torch and its neighbours lacks, as a folder of wheels.

Collected where a package registry is, installed where none is: into a private directory, and only what is not there.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from swift_stage2.errors import UserError

MOST_BYTES = 64 << 20
PYTHON_VERSION = "3.12"
# Learner and server import these beside torch, transformers, accelerate. Declared needs of ms-swift that they
# never import (oss2, nltk, openai, …) are left out.
PINNED = (
    "annotated-doc==0.0.7", "annotated-types==0.8.0", "cffi==2.1.1", "cryptography==50.0.2", "datasets==4.8.4",
    "dill==0.4.1", "einops==0.8.2", "fastapi==0.165.0", "hotcoco==1.3.0", "importlib-metadata==10.2.0",
    "json-repair==0.64.6",
    "modelscope==1.40.2", "modelscope-hub==0.5.1", "ms-swift==4.6.0", "multiprocess==0.70.19",
    "opentelemetry-api==1.45.2", "peft==0.20.0", "psutil==7.2.2", "pycparser==3.12", "pydantic==2.14.3",
    "pydantic-core==2.50.4", "pyyaml==6.0.3",
    "qwen-vl-utils==0.0.14", "simplejson==4.3.0", "sniffio==1.3.1", "starlette==1.10.0", "trl==0.29.1",
    "typing-inspection==0.4.5", "uvicorn==0.54.0", "xxhash==4.1.0", "zipp==4.1.2", "zstandard==0.25.0",
)  # fmt: skip
_PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
_DOWNLOAD_S = 600.0
_INSTALL_S = 120.0


def collect(directory: Path, python_version: str = PYTHON_VERSION) -> int:
    """Downloads ``PINNED`` for that Python on x86-64 Linux; returns the bytes of the folder.

    Raises UserError: the registry does not give them, or the folder is larger than ``MOST_BYTES``.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--collect must be a folder that can be written, got {directory} ({error})"
        ) from error
    target = ["--python-version", python_version, "--implementation", "cp", "--only-binary=:all:"]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    options = ["download", "--no-deps", "--quiet", "--dest", str(directory), *target, *platforms]
    _pip([*options, *PINNED], _DOWNLOAD_S, "wheels cannot be collected")
    num_bytes = sum(file.stat().st_size for file in directory.glob("*.whl"))
    if num_bytes > MOST_BYTES:
        raise UserError(
            f"wheels must fit in {MOST_BYTES >> 20} MiB, got {num_bytes >> 20} MiB in {directory}; use an empty folder"
        )
    return num_bytes


def install_missing(wheels: Path, private: Path) -> list[str]:
    """Installs those of ``wheels`` that this Python does not have into ``private``, and returns their names.

    A package that the machine has is left alone, whatever its version: the check is of that machine.

    Raises:
        UserError: there is no wheel, or pip cannot install one.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise UserError(
            f"--wheels must be a folder with wheels, got none in {wheels}; make it with --collect"
        )
    missing = [file for file in files if installed_version(file.name.partition("-")[0]) is None]
    if missing:
        options = ["install", "--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(private)]
        _pip([*options, *map(str, missing)], _INSTALL_S, "wheels cannot be installed")
    return [file.name.partition("-")[0] for file in missing]


def installed_version(name: str) -> str | None:
    """None where there is no such package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip(arguments: list[str], timeout_s: float, failure: str) -> None:
    """Runs this interpreter's own pip; a process that is late is killed and reaped."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{failure}: pip did not end within {timeout_s:.0f} s; try again") from error
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
        raise UserError(f"{failure}: {told[-1].strip()}")
