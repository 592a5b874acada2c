"""The one line of a log that says best why its process failed."""

from __future__ import annotations

import re
from pathlib import Path

_SOURCE_PREFIX = re.compile(r"^(?:\[[\w-]+\] )*(?:\[rank\d+\]: ?)?")
_OWN_ERROR = re.compile(r"swift-stage2(?: \w+)*: error: ")
_OURS_RAISED = re.compile(r"^swift_stage2\.errors\.\w+: ")  # says more than what it was raised from
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b")


def last_cause(log_path: Path, offset: int = 0) -> str:
    """``offset``: bytes of earlier processes in the same log."""
    try:
        with log_path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode("utf-8", errors="replace")
    except OSError as exc:
        return f"its log cannot be read ({exc})"
    lines = [_SOURCE_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    for pattern in (_OWN_ERROR, _OURS_RAISED, _RAISED):
        for line in lines:  # the first failure is the cause, later ones follow from it
            if pattern.match(line):
                return line
    return lines[-1] if lines else "it wrote nothing"
