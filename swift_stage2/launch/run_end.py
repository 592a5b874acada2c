"""What a launch that has ended left behind, in one line: where it is, how far it came, what channel B ran.

Read from the last ``metrics`` record of rank 0's audit, which every learner writes when it closes; only the end of the
file is read, because it may be large.
"""

from __future__ import annotations

from pathlib import Path

from swift_stage2.telemetry.audit import Record, record_of
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, has_form

_TAIL_BYTES = 1 << 20


def describe_end(output_dir: Path, status: int, since: float) -> str:
    """The launch's last words. ``since``: Unix seconds of its start; what was written before is of an earlier run."""
    run_dir = newest_run(output_dir, since)
    words = "finished" if status == 0 else f"ended with status {status}"
    if run_dir is None:
        return f"{words}; no audit of this run in {output_dir}"
    record = _last_metrics(run_dir / "audit" / "rank0.jsonl")
    numbers = {} if record is None else record["numbers"]
    steps = f", {numbers['steps']:g} steps" if "steps" in numbers else ""
    ran = (
        f", B at {numbers['b_steps_run']:g} of {numbers['b_steps_wanted']:g} wanted"
        if numbers.get("b_steps_wanted")
        else ""
    )
    return f"{words}{steps}{ran}; run directory {run_dir}"


def newest_run(output_dir: Path, since: float) -> Path | None:
    """The run directory that was written to since, if any; ms-swift may have made a folder ``vN-DATE`` of its own."""
    audits = [*output_dir.glob("audit/rank0.jsonl"), *output_dir.glob("v*/audit/rank0.jsonl")]
    written = {audit: audit.stat().st_mtime for audit in audits}
    newest = max(written, key=lambda audit: written[audit], default=None)
    return None if newest is None or written[newest] < since else newest.parent.parent


def _last_metrics(path: Path) -> Record | None:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if b'"metrics"' in line:
            record = record_of(line)  # None: torn by a kill, or cut by where the tail begins
            if record is not None and record["kind"] == "metrics" and has_form(record, AUDIT_FORMS):
                return record
    return None
