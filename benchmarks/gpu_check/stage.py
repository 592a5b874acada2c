"""Every stage in the order in which they run, what is least known first; what one is given; the page of the results.

``gpu-check.json`` and ``gpu-check.md`` are written with every stage; its figures as they come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_stage2.errors import Stage2Error
from swift_stage2.whole_file import write_whole

JSON_FILE = "gpu-check.json"
PAGE_FILE = "gpu-check.md"
FIGURES_FILE = "figures.json"
_LONGEST_LINE = 300
_UNTIL = "until_"

Figure = str | int | float | bool


class CheckFailed(Stage2Error):
    """A stage found something that must not be."""


class CheckSkipped(Stage2Error):
    """A stage cannot run on this machine; the message says why."""


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing to show: ``work(context)`` raises ``CheckFailed`` or ``CheckSkipped``, or returns when all held."""

    name: str
    seconds: float
    """Time limit of the stage; ``--stages NAME=S`` sets another, and what is left of the whole check bounds it."""
    work: str
    """``module:function``, imported in the stage's own process."""
    proves: str
    needs: tuple[str, ...] = ()
    """Packages by the names under which they are imported."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Further keyword arguments of the function."""


_HERE = "benchmarks.gpu_check"
_SWIFT = ("swift", "datasets", "peft", "fastapi", "uvicorn")

STAGES = (
    Stage("machine", 30, f"{_HERE}.device:machine",
          proves="what device and which packages are there"),
    Stage("learner-full", 180, f"{_HERE}.training:one_rank", needs=_SWIFT, arguments={"tuner": "full"},
          proves="full tuning and our server on one device: 12 steps, rounds proven by sums and canary"),
    Stage("copy-stream", 60, f"{_HERE}.copy_stream:copy_stream", needs=("transformers", "peft"),
          proves="a snapshot at 3B copied beside training is whole though the optimizer steps at once; its ratio"),
    Stage("learner-lora", 120, f"{_HERE}.training:one_rank", needs=_SWIFT, arguments={"tuner": "lora"},
          proves="LoRA and our server on one device: 12 steps, rounds proven by sums and canary"),
    Stage("two-ranks", 120, f"{_HERE}.training:two_ranks", needs=_SWIFT,
          proves="two ranks on one device over gloo: equal plans, proven rounds, a common stop on SIGTERM"),
    Stage("one-gpu-vllm", 300, f"{_HERE}.training:one_gpu_vllm", needs=(*_SWIFT, "vllm"),
          proves="launch: LoRA and our server on vLLM share one device: 12 steps, rounds proven by sums and canary"),
    Stage("arithmetic", 30, f"{_HERE}.device:arithmetic",
          proves="checksums and looks for NaN give on the GPU what they give on the CPU"),
    Stage("isolation", 40, f"{_HERE}.isolation:isolation", needs=_SWIFT,
          proves="packed segments do not see each other, and an injected leak is seen"),
    Stage("round-memory", 70, f"{_HERE}.real_shapes:round_memory", needs=("transformers", "peft"),
          proves="seconds and memory of export, LoRA merge and pack at 3B and 7B, and what a lack of memory does"),
    Stage("zero3", 120, f"{_HERE}.training:zero3", needs=(*_SWIFT, "deepspeed"),
          proves="ZeRO-3 with one rank: shapes under partitioning reach the server proven"),
    Stage("nccl-rollout", 240, f"{_HERE}.nccl_rollout:run", needs=(*_SWIFT, "vllm"),
          proves="stock swift rollout over NCCL at TP 1 and 2: three rounds, SIGKILL and SIGSTOP in a push, rejoin"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    rehearsal: bool
    """On the CPU, with tiny shapes."""
    scratch: Path
    """Shared by all stages of a check; removed at its end."""
    logs: Path
    """Gets the figures, and the logs of processes that a stage starts."""
    deadline_s: float
    began: float = field(default_factory=time.time)
    """When the stage did, Unix seconds."""
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """In torch's words."""
        return "cpu" if self.rehearsal else "cuda:0"

    @property
    def dtype(self) -> str:
        """Of weights, in torch's words. Half precision is what a GPU trains in and too slow to rehearse."""
        return "float32" if self.rehearsal else "bfloat16"

    def note(self, name: str, value: Figure) -> None:
        """Adds a figure and writes all: a process that dies leaves those it had. Names end in their unit, as ``_s``."""
        self.figures[name] = round(value, 4) if isinstance(value, float) else value
        write_whole(self.logs / FIGURES_FILE, json.dumps(self.figures))

    def at(self, part: str) -> None:
        """Notes how many seconds the stage took until it was at ``part``, when that is told first."""
        if (name := f"{_UNTIL}{part}_s") not in self.figures:
            self.note(name, time.time() - self.began)
            print(f"{part} after {self.figures[name]:.1f} s", flush=True)


def last_part(figures: Mapping[str, Figure]) -> str:
    """The part that a stage was at last, and after how many seconds, in a few words; empty if it told none."""
    name = next((name for name in reversed(list(figures)) if name.startswith(_UNTIL)), "")
    return f"{name.removeprefix(_UNTIL).removesuffix('_s')} after {figures[name]:.0f} s" if name else ""


def one_line(text: str) -> str:
    """Text without breaks, and not longer than a row of a table bears."""
    whole = " ".join(text.split())
    return whole if len(whole) <= _LONGEST_LINE else f"{whole[: _LONGEST_LINE - 1]}…"


def write_report(
    directory: Path, stages: Sequence[Mapping[str, Any]], *, rehearsal: bool, finished: bool, seconds: float
) -> None:
    """Writes both files with the records of ``stages``; ``finished``: there are no more."""
    whole = {"rehearsal": rehearsal, "finished": finished, "seconds": round(seconds, 1), "stages": stages}
    write_whole(directory / JSON_FILE, json.dumps(whole, indent=1) + "\n")
    write_whole(directory / PAGE_FILE, page(whole))


def page(report: Mapping[str, Any]) -> str:
    """``report`` is what ``gpu-check.json`` holds: ``rehearsal``, ``finished``, ``seconds``, ``stages`` as records."""
    stages = report["stages"]
    device = next(
        (each["figures"]["device"] for each in stages if "device" in each["figures"]), "device unknown"
    )
    heading = f"# GPU check: {device}\n"
    if report["rehearsal"]:
        heading = "# GPU check, rehearsed on a CPU\n\nNo figure on this page says anything about a GPU.\n"
    counts = ", ".join(f"{sum(each['status'] == status for each in stages)} {status}" for status in Status)
    unended = "" if report["finished"] else " The check was interrupted; later stages are missing."
    rows = [
        (each["name"], each["status"], f"{each['seconds']:.0f}", each["why"] or each["proves"])
        for each in stages
    ]
    tables = _table(("stage", "outcome", "s", "what it shows, or why not"), rows)
    for each in stages:
        if each["figures"]:
            tables += f"\n## {each['name']}, on {device}\n\n"
            tables += _table(("figure", "value"), each["figures"].items())
    return f"{heading}\n{counts}; {report['seconds']:.0f} s in all.{unended}\n\n{tables}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
