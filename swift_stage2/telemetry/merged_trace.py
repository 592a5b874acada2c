"""Puts the traces of a run's ranks into one file that Perfetto shows side by side: their times are of one clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.whole_file import write_whole


def trace_files(run_dir: Path) -> list[Path]:
    """What the ranks of a run wrote, by rank; empty without ``telemetry.trace``, and until the run has ended."""
    return sorted(run_dir.glob("trace/rank*.json"), key=lambda path: (len(path.name), path.name))


def merge_traces(files: Sequence[Path]) -> dict[str, Any]:
    """One Chrome trace of all.

    Raises:
        UserError: a file is no trace of a rank.
    """
    events: list[Any] = []
    about: dict[str, Any] = {}
    for path in files:
        try:
            trace = json.loads(path.read_bytes())
            events += trace["traceEvents"]
            about[path.stem] = trace["otherData"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"a trace of a rank must be whole, got path={path}: {type(error).__name__}: {error}; "
                "remove it, the others will do"
            ) from error
    return {"traceEvents": events, "otherData": about}


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Writes it whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, json.dumps(trace))
