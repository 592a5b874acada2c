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
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.ledger_account import Checkpoint, Witness, effective_histories
from swift_stage2.telemetry.reading import (
    LEDGER_FORMS,
    RankRecords,
    has_form,
    rank_files,
    read_files,
    read_ledgers,
    read_ranks,
)


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
    def ledger_records(self) -> list[Record]:
        """What counts of all ledgers, rank by rank."""
        return list(chain.from_iterable(self.histories.values()))

    def setting(self, *path: str) -> Any:
        """One key of the last process's configuration; None where it is not known."""
        starts = self.first.starts if self.first else []
        value: Any = starts[-1].get("settings") if starts else None
        for key in ("config", *path):
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
        found = {rank: Witness(checkpoints=list(each)) for rank, each in self.checkpoints.items()}
        for records in self.ranks:
            witness = found.setdefault(records.rank, Witness())
            witness.packs = {
                (number, pack["pack_id"]) for number, step in records.steps.items() for pack in step["packs"]
            }
            witness.ended_run = records.ended_run
        return found


def read_run(run_dirs: Sequence[Path]) -> RunData:
    """Everything under these directories.

    Raises:
        UserError: there is neither a ledger nor an audit, a file cannot be read, or these are several runs.
    """
    _refuse_unrelated(run_dirs)
    ranks = read_ranks(run_dirs)
    for rank, records, num_unreadable in read_files(run_dirs, "matches"):
        found = ranks.setdefault(rank, RankRecords(rank))
        found.num_odd_matches += num_unreadable
        found.matches.extend(
            record for record in records if record["kind"] != GAP and not found.is_void(record.get("time"))
        )
    # A directory without an audit is asked for its ledger too, so that what it lacks is told.
    asked = [each for each in run_dirs if rank_files(each, "ledger") or not rank_files(each, "audit")]
    ledgers = read_ledgers(asked) if asked else {}
    histories = effective_histories(ledgers) if ledgers else {}
    return RunData(
        run_dirs=tuple(run_dirs),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        ledgers=ledgers,
        histories={rank: tuple(chain.from_iterable(parts)) for rank, parts in histories.items()},
        checkpoints=_read_checkpoints(run_dirs),
    )


def _refuse_unrelated(run_dirs: Sequence[Path]) -> None:
    """Every directory but the first must begin with a process that resumed a checkpoint of those before it."""
    if len(run_dirs) == 1:
        return
    saved: set[str] = set()
    for number, run_dir in enumerate(run_dirs):
        ledgers = read_ledgers([run_dir]) if rank_files(run_dir, "ledger") else {}
        records = list(chain.from_iterable(ledgers.values()))
        if number and not _goes_on(run_dir, records, saved):
            raise UserError(
                "the directories given to one report are those of one run, each resumed from a checkpoint of those "
                f"before it, oldest first, got {run_dir}, which resumed none of them; run report on each directory by "
                "itself (it tells of one run, and compares none)"
            )
        saved |= {record["save_id"] for record in records if record["kind"] == Entry.CHECKPOINT}
        saved |= {each.save_id for each in chain.from_iterable(_read_checkpoints([run_dir]).values())}


def _goes_on(run_dir: Path, ledger: Sequence[Record], saved: set[str]) -> bool:
    """Whether the directory's first process resumed one of these saves; where they are not known, whether any."""
    starts = [record for record in ledger if record["kind"] == Entry.START]
    if starts and saved:
        return starts[0]["save_id"] in saved
    audits = (record for _, records, _ in read_files([run_dir], "audit") for record in records)
    steps = [record.get("step") for record in (*starts, *audits) if record["kind"] == Entry.START]
    return not steps or steps[0] != 0


def _read_checkpoints(run_dirs: Sequence[Path]) -> dict[int, list[Checkpoint]]:
    """By rank, what the checkpoints in these directories hold of channel B; a file that is not whole holds nothing."""
    found: dict[int, list[Checkpoint]] = {}
    for path in sorted(path for each in run_dirs for path in each.glob("checkpoint-*/stage2_rank*.json")):
        rank = path.stem.removeprefix("stage2_rank")
        if rank.isdecimal() and (checkpoint := _read_checkpoint(path)) is not None:
            found.setdefault(int(rank), []).append(checkpoint)
    return found


def _read_checkpoint(path: Path) -> Checkpoint | None:
    try:
        content = json.loads(path.read_bytes())
        step, saved = content["step"], content["state"]
        save_id, state = saved["save_id"], saved["learner"]["source"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    record = {"kind": Entry.CHECKPOINT, "step": step, "save_id": save_id, "state": state}
    return Checkpoint(path.parent.name, step, save_id, state) if has_form(record, LEDGER_FORMS) else None
