"""Reads what a run left behind: audits, ledgers and matches of every rank, without what a resume made void."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import GAP, Record
from swift_stage2.telemetry.ledger import Entry, read_ledgers
from swift_stage2.telemetry.ledger_account import effective_histories
from swift_stage2.telemetry.ledger_witnesses import Checkpoint, Witness
from swift_stage2.telemetry.rank_records import RankRecords, rank_files, read_files, read_ranks
from swift_stage2.telemetry.record_forms import LEDGER_FORMS, has_form


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything that is known of one run."""

    run_dirs: tuple[Path, ...]
    ranks: tuple[RankRecords, ...]
    """By rank; empty without an audit."""
    ledgers: Mapping[int, Sequence[Record]]
    """As they were written; empty without channel B."""
    histories: Mapping[int, tuple[Record, ...]]
    """By rank, what counts of its ledger."""
    checkpoints: Mapping[int, Sequence[Checkpoint]]
    """By rank, those that lie in the directories."""

    @property
    def first(self) -> RankRecords | None:
        """The lowest rank, which tells what is equal on all."""
        return self.ranks[0] if self.ranks else None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The configuration of the last process; None where it was not written down."""
        starts = self.first.starts if self.first else []
        found = starts[-1].get("settings", {}).get("config") if starts else None
        return found if isinstance(found, Mapping) else None

    def setting(self, *path: str) -> Any:
        """One key of the configuration; None where it is not known."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def number_setting(self, *path: str) -> Any:
        """One key of the configuration that holds a number; None where it is not known."""
        value = self.setting(*path)
        return value if isinstance(value, int | float) and 0 <= value < math.inf else None

    @property
    def had_no_b(self) -> bool:
        """Whether it is known that no sample of channel B was drawn: every rank tells of itself and lost nothing."""
        return bool(self.ranks) and all(
            records.starts
            and not records.num_lost
            and not any(step["wants_b"] for step in records.steps.values())
            and not (records.steps and any(start.get("queue_limit") for start in records.starts))
            for records in self.ranks
        )

    @property
    def witnesses(self) -> dict[int, Witness]:
        """By rank, what else tells of what its ledger must hold."""
        found = {
            records.rank: Witness(
                {
                    (number, pack["pack_id"])
                    for number, step in records.steps.items()
                    for pack in step["packs"]
                },
                records.ended_run,
            )
            for records in self.ranks
        }
        for rank, checkpoints in self.checkpoints.items():
            found.setdefault(rank, Witness()).checkpoints.extend(checkpoints)
        return found


def read_run(run_dirs: Sequence[Path]) -> RunData:
    """Everything under these directories.

    Raises:
        UserError: there is neither a ledger nor an audit, a file cannot be read, or these are several runs.
    """
    refuse_unrelated(run_dirs)
    ranks = _with_matches(run_dirs)
    # A directory without an audit is asked for its ledger too, so that what it lacks is told.
    asked = [
        run_dir for run_dir in run_dirs if rank_files(run_dir, "ledger") or not rank_files(run_dir, "audit")
    ]
    ledgers = read_ledgers(asked) if asked else {}
    histories = effective_histories(ledgers) if ledgers else {}
    return RunData(
        run_dirs=tuple(run_dirs),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        ledgers=ledgers,
        histories={rank: tuple(chain.from_iterable(parts)) for rank, parts in histories.items()},
        checkpoints=read_checkpoints(run_dirs),
    )


def _with_matches(run_dirs: Sequence[Path]) -> dict[int, RankRecords]:
    ranks = read_ranks(run_dirs)
    for rank, records, num_unreadable in read_files(run_dirs, "matches"):
        found = ranks.setdefault(rank, RankRecords(rank))
        found.num_odd_matches += num_unreadable
        found.matches.extend(
            record for record in records if record["kind"] != GAP and not found.is_void(record.get("time"))
        )
    return ranks


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
