"""Every stage in the order in which they run, cheap ones first; what one is given, and the page of what they found.

``gpu-check.json`` and ``gpu-check.md`` are written with every stage; its figures as they come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from swift_stage2.whole_file import write_whole

Figure = str | int | float | bool


class Status(StrEnum):
    """The end of a stage."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing to show: ``work(context)`` raises ``CheckFailed`` or ``CheckSkipped``, or returns when all held."""

    name: str
    weight: int
    """Its share of the time that is left, against the weights of the stages after it."""
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
    Stage("machine", 2, f"{_HERE}.device:machine",
          proves="what device and which packages are there"),
    Stage("arithmetic", 3, f"{_HERE}.device:arithmetic",
          proves="checksums and looks for NaN give on the GPU what they give on the CPU"),
    Stage("real-shapes", 6, f"{_HERE}.real_shapes:shapes", needs=("transformers",),
          proves="Qwen2.5-VL-3B and a 2-layer Qwen3-VL are made, saved and loaded at their real shapes"),
    Stage("isolation", 6, f"{_HERE}.training:isolation", needs=_SWIFT,
          proves="packed segments do not see each other, and an injected leak is seen"),
    Stage("streams", 3, f"{_HERE}.transfers:streams",
          proves="a late or never-ending transfer on a side stream neither stops training nor outlives its deadline"),
    Stage("round-memory", 7, f"{_HERE}.real_shapes:round_memory", needs=("transformers", "peft"),
          proves="seconds and memory of export, LoRA merge and pack at 3B and 7B, and what a lack of memory does"),
    Stage("handover", 4, f"{_HERE}.transfers:handover",
          proves="a pinned snapshot under a backward pass, and weights in another process by memory file and CUDA IPC"),
    Stage("learner-lora", 12, f"{_HERE}.training:one_rank", needs=_SWIFT, arguments={"tuner": "lora"},
          proves="LoRA and our server on one device: 12 steps, rounds proven by sums and canary"),
    Stage("learner-full", 12, f"{_HERE}.training:one_rank", needs=_SWIFT, arguments={"tuner": "full"},
          proves="full tuning and our server on one device: 12 steps, rounds proven by sums and canary"),
    Stage("two-ranks", 10, f"{_HERE}.training:two_ranks", needs=_SWIFT,
          proves="two ranks on one device over gloo: equal plans, proven rounds, a common stop on SIGTERM"),
    Stage("zero3", 8, f"{_HERE}.training:zero3", needs=(*_SWIFT, "deepspeed"),
          proves="ZeRO-3 with one rank: shapes under partitioning reach the server proven"),
    Stage("nccl-rollout", 16, f"{_HERE}.nccl_rollout:run", needs=(*_SWIFT, "vllm"),
          proves="stock swift rollout over NCCL at TP 1 and 2: three rounds, SIGKILL and SIGSTOP in a push, rejoin"),
)  # fmt: skip


class FigureLog:
    """Named figures, written to a file with each new one: a process that dies leaves those it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Figure] = {}

    def note(self, name: str, value: Figure) -> None:
        """Adds a figure. Names end in their unit, as ``_s`` or ``_gib``."""
        self._figures[name] = round(value, 4) if isinstance(value, float) else value
        write_whole(self._path, json.dumps(self._figures))

    @staticmethod
    def read(path: Path) -> dict[str, Figure]:
        """Reads the notes of a file; empty if there are none."""
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The place and the time that a stage has to run."""

    rehearsal: bool
    """On the CPU, with tiny shapes."""
    scratch: Path
    """Shared by all stages of a check; removed at its end."""
    logs: Path
    """For the logs of processes that a stage starts."""
    deadline_s: float
    figures: FigureLog

    @property
    def device(self) -> str:
        """In torch's words."""
        return "cpu" if self.rehearsal else "cuda:0"

    @property
    def dtype(self) -> str:
        """Of weights, in torch's words. Half precision is what a GPU trains in and too slow to rehearse."""
        return "float32" if self.rehearsal else "bfloat16"


def one_line(text: str, limit: int = 300) -> str:
    """Text without breaks, and not longer than a row of a table bears."""
    whole = " ".join(text.split())
    return whole if len(whole) <= limit else f"{whole[: limit - 1]}…"


JSON_FILE = "gpu-check.json"
PAGE_FILE = "gpu-check.md"


class Report:
    """Collects the findings so far and writes both files with every stage."""

    def __init__(self, directory: Path, *, rehearsal: bool, started: float) -> None:
        self.directory = directory
        self._rehearsal = rehearsal
        self._started = started
        self._records: list[dict[str, Any]] = []

    @property
    def num_failed(self) -> int:
        """Stages that failed."""
        return sum(record["status"] == Status.FAILED for record in self._records)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self._started

    def add(self, record: dict[str, Any], *, finished: bool) -> None:
        """One more stage, and whether it was the last."""
        self._records.append(record)
        whole = {
            "rehearsal": self._rehearsal,
            "finished": finished,
            "seconds": round(self.elapsed_s, 1),
            "stages": self._records,
        }
        write_whole(self.directory / JSON_FILE, json.dumps(whole, indent=1) + "\n")
        write_whole(self.directory / PAGE_FILE, page(whole))


def page(report: Mapping[str, Any]) -> str:
    """``report`` is what ``gpu-check.json`` holds: ``rehearsal``, ``seconds``, and ``stages`` as records."""
    stages = report["stages"]
    counts = {
        word: sum(each["status"] == word for each in stages) for word in ("passed", "failed", "skipped")
    }
    device = _device(stages)
    heading = f"# GPU check: {device}\n"
    if report["rehearsal"]:
        heading = "# GPU check, rehearsed on a CPU\n\nNo figure on this page says anything about a GPU.\n"
    told = ", ".join(f"{number} {word}" for word, number in counts.items())
    unended = "" if report["finished"] else " The check was interrupted; later stages are missing."
    rows = "".join(
        f"| {each['name']} | {each['status']} | {each['seconds']:.0f} | {_cell(each['why'] or each['proves'])} |\n"
        for each in stages
    )
    figures = "".join(_figures(each, device) for each in stages if each["figures"])
    return (
        f"{heading}\n{told}; {report['seconds']:.0f} s in all.{unended}\n\n"
        f"| stage | outcome | s | what it shows, or why not |\n| --- | --- | --- | --- |\n{rows}{figures}"
    )


def _device(stages: list[Mapping[str, Any]]) -> str:
    for each in stages:
        if "device" in each["figures"]:
            return str(each["figures"]["device"])
    return "device unknown"


def _figures(stage: Mapping[str, Any], device: str) -> str:
    rows = "".join(f"| {_cell(name)} | {_cell(value)} |\n" for name, value in stage["figures"].items())
    return f"\n## {stage['name']}, on {device}\n\n| figure | value |\n| --- | --- |\n{rows}"


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
