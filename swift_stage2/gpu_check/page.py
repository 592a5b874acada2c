"""The report of a check as one page of Markdown: pure, nothing is read or asked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
