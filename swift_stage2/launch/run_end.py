"""The end of a run, as the launcher reads it from rank 0's audit.

The last line comes from the audit's end: its last ``metrics`` record, which every learner writes when it closes, and
what it may write after that.
"""

from __future__ import annotations

from pathlib import Path

from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.reading import record_of
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, has_form
from swift_stage2.telemetry.summary import share_of_b
from swift_stage2.whole_file import open_regular

_TAIL_BYTES = 1 << 20


def describe_end(output_dir: Path, status: int, since: float) -> str:
    """The launch's last words. ``since``: Unix seconds of its start; what was written before is of an earlier run."""
    run_dir = newest_run(output_dir, since)
    words = "finished" if status == 0 else f"ended with status {status}"
    if run_dir is None:
        return f"{words}; no audit of this run in {output_dir}"
    records = _last_records(run_dir / "audit" / "rank0.jsonl")
    numbers = records["metrics"]["numbers"] if "metrics" in records else {}
    steps = f", {numbers['steps']:g} steps" if "steps" in numbers else ""
    ran = f", {told}" if (told := share_of_b(numbers)) else ""
    unused = f"; WARNING: {records['unused_b']['cause']}" if "unused_b" in records else ""
    return f"{words}{steps}{ran}; run directory {run_dir}{unused}"


def newest_run(output_dir: Path, since: float) -> Path | None:
    """The run directory that was written to since, if any; ms-swift may have made a folder ``vN-DATE`` of its own."""
    audits = [*output_dir.glob("audit/rank0.jsonl"), *output_dir.glob("v*/audit/rank0.jsonl")]
    written = {audit: audit.stat().st_mtime for audit in audits}
    newest = max(written, key=lambda audit: written[audit], default=None)
    return None if newest is None or written[newest] < since else newest.parent.parent


def _last_records(path: Path) -> dict[str, Record]:
    """The last ``metrics`` record, and those behind it, by kind."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    records: dict[str, Record] = {}
    for line in reversed(lines):
        record = record_of(line)  # None: torn by a kill, or cut by where the tail begins
        if record is None or not has_form(record, AUDIT_FORMS):
            continue
        records.setdefault(record["kind"], record)
        if record["kind"] == "metrics":
            break
    return records
