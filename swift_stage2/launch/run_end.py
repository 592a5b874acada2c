"""The end of a run, as the launcher reads it from rank 0's audit, and commands for its last checkpoint.

The last line comes from the audit's end: its last ``metrics`` record, which every learner writes when it closes, and
what it may write after that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_stage2.dataset.files import local_files
from swift_stage2.errors import UserError
from swift_stage2.run_directory.checkpoints import checkpoints_in
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.reading import record_of
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, has_form
from swift_stage2.telemetry.summary import share_of_b
from swift_stage2.whole_file import open_regular

_TAIL_BYTES = 1 << 20
_LINK = "last-checkpoint"  # ms-swift's, to what was saved last


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


def next_commands(run_dir: Path, swift: Mapping[str, Any]) -> Iterator[str]:
    """The last checkpoint, and commands that merge and evaluate it; none without a checkpoint.

    ``swift`` are the run's arguments of ms-swift: without a validation set of its own there is no command to evaluate.
    """
    steps, checkpoint = checkpoints_in(run_dir), run_dir / _LINK
    if not checkpoint.is_dir():
        if not steps:
            return
        checkpoint = steps[max(steps)]
    yield f"last checkpoint: {checkpoint}"
    if (checkpoint / "adapter_config.json").is_file():
        adapter = checkpoint.resolve()
        checkpoint = adapter.with_name(f"{adapter.name}-merged")
        words = ("--adapters", adapter, "--merge_lora", "true", "--output_dir", checkpoint)
        yield f"merge it: {shlex.join(['swift', 'export', *map(str, words)])}"
    with suppress(UserError):  # they have been moved since
        for validation in local_files(swift)["val_dataset"][:1]:
            yield f"evaluate it: {evaluate_command(validation, checkpoint)}"


def evaluate_command(data: Path, checkpoint: Path) -> str:
    """Of the rows of ``data``; its files go beside the checkpoints."""
    output = checkpoint.with_name("evaluation")
    words = ("--data", data.absolute(), "--model", checkpoint, "--output", output)
    return shlex.join(["swift-stage2", "evaluate", *map(str, words)])
