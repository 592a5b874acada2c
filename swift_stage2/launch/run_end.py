"""The end of a run, as the launcher reads it from the last events of rank 0's log: ``Metrics`` and ``End``."""

from __future__ import annotations

from pathlib import Path

from swift_stage2.telemetry.event_log import event_of, event_path
from swift_stage2.telemetry.events import End, Metrics
from swift_stage2.telemetry.summary import share_of_b
from swift_stage2.whole_file import open_regular

_TAIL_BYTES = 1 << 20


def describe_end(output_dir: Path, status: int, since: float) -> str:
    """The launch's last words. ``since``: Unix seconds of its start; what was written before is of an earlier run."""
    run_dir = newest_run(output_dir, since)
    words = "finished" if status == 0 else f"ended with status {status}"
    if run_dir is None:
        return f"{words}; no events of this run in {output_dir}"
    metrics, end = _last_events(event_path(run_dir, 0))
    numbers = metrics.numbers if metrics is not None else {}
    steps = f", {numbers['steps']:g} steps" if "steps" in numbers else ""
    ran = f", {told}" if (told := share_of_b(numbers)) else ""
    unused = f"; WARNING: {end.unused_b}" if end is not None and end.unused_b else ""
    return f"{words}{steps}{ran}; run directory {run_dir}{unused}"


def newest_run(output_dir: Path, since: float) -> Path | None:
    """The run directory that was written to since, if any; ms-swift may have made a folder ``vN-DATE`` of its own."""
    logs = [event_path(each, 0) for each in (output_dir, *output_dir.glob("v*"))]
    written = {log: log.stat().st_mtime for log in logs if log.is_file()}
    newest = max(written, key=lambda log: written[log], default=None)
    return None if newest is None or written[newest] < since else newest.parent.parent


def _last_events(path: Path) -> tuple[Metrics | None, End | None]:
    """The last metrics, and the end behind them."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    end = None
    for event in map(event_of, reversed(lines)):
        if isinstance(event, Metrics):
            return event, end
        end = event if isinstance(event, End) else end
    return None, end
