"""What a check found so far, as ``gpu-check.json`` and ``gpu-check.md``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.stage import Status
from swift_stage2.whole_file import write_whole

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
