"""Finds out whether directories hold parts of one run, and which checkpoints lie in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import Record
from swift_stage2.telemetry.ledger import Entry, read_ledgers
from swift_stage2.telemetry.ledger_account import Checkpoint
from swift_stage2.telemetry.rank_records import rank_files, read_files
from swift_stage2.telemetry.record_forms import LEDGER_FORMS, has_form


def refuse_unrelated(run_dirs: Sequence[Path]) -> None:
    """Every directory but the first must begin with a process that resumed a checkpoint of those before it.

    Raises:
        UserError: one does not.
    """
    if len(run_dirs) == 1:
        return
    saved: set[str] = set()
    for number, run_dir in enumerate(run_dirs):
        records = _ledger_records(run_dir)
        if number and not _goes_on(run_dir, records, saved):
            raise UserError(
                "the directories given to one report are those of one run, each resumed from a checkpoint of those "
                f"before it, oldest first, got {run_dir}, which resumed none of them; run report on each directory by "
                "itself (it tells of one run, and compares none)"
            )
        saved |= {record["save_id"] for record in records if record["kind"] == Entry.CHECKPOINT}
        saved |= {
            each.save_id for checkpoints in read_checkpoints([run_dir]).values() for each in checkpoints
        }


def read_checkpoints(run_dirs: Sequence[Path]) -> dict[int, list[Checkpoint]]:
    """By rank, what the checkpoints in these directories hold of channel B; a file that is not whole holds nothing."""
    found: dict[int, list[Checkpoint]] = {}
    for path in sorted(
        path for run_dir in run_dirs for path in run_dir.glob("checkpoint-*/stage2_rank*.json")
    ):
        if (checkpoint := _read(path)) is not None and path.stem[len("stage2_rank") :].isdecimal():
            found.setdefault(int(path.stem[len("stage2_rank") :]), []).append(checkpoint)
    return found


def _read(path: Path) -> Checkpoint | None:
    try:
        content = json.loads(path.read_bytes())
        step, save_id, state = (
            content["step"],
            content["state"]["save_id"],
            content["state"]["learner"]["source"],
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    record = {"kind": Entry.CHECKPOINT, "step": step, "save_id": save_id, "state": state}
    return Checkpoint(path.parent.name, step, save_id, state) if has_form(record, LEDGER_FORMS) else None


def _ledger_records(run_dir: Path) -> list[Record]:
    ledgers = read_ledgers([run_dir]) if rank_files(run_dir, "ledger") else {}
    return list(chain.from_iterable(ledgers.values()))


def _goes_on(run_dir: Path, ledger: Sequence[Record], saved: set[str]) -> bool:
    """Whether the directory's first process resumed one of these saves; where they are not known, whether any."""
    starts = [record for record in ledger if record["kind"] == Entry.START]
    if starts and saved:
        return starts[0]["save_id"] in saved
    audits = (record for _, records, _ in read_files([run_dir], "audit") for record in records)
    steps = [record.get("step") for record in (*starts, *audits) if record["kind"] == Entry.START]
    return not steps or steps[0] != 0
