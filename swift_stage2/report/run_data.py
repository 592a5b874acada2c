"""Reads what a run left behind: audits, ledgers and matches of every rank, without what a resume made void."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import GAP, Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.reading import (
    Process,
    RankRecords,
    effective_histories,
    rank_files,
    read_files,
    read_ledgers,
    read_ranks,
    run_of,
)
from swift_stage2.telemetry.record_forms import LEDGER_FORMS, has_form
from swift_stage2.whole_file import read_regular

_MOST_STEPS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One rank's file in a checkpoint, as far as it tells of samples."""

    name: str
    step: int
    save_id: str
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    run_dirs: tuple[Path, ...]
    ranks: tuple[RankRecords, ...]
    """By rank; empty without an audit."""
    ledgers: Mapping[int, Sequence[Record]]
    """As they were written; empty without channel B."""
    histories: Mapping[int, Sequence[Process]]
    """By rank, the part of its ledger that counts, process by process."""
    checkpoints: Mapping[int, Sequence[Checkpoint]]
    """By rank, those that lie in the directories."""

    @property
    def first(self) -> RankRecords:
        """The lowest rank, which tells what is equal on all; without an audit one that tells nothing."""
        return self.ranks[0] if self.ranks else RankRecords(0)

    @property
    def ledger_records(self) -> list[Record]:
        """All that counts of all ledgers, rank by rank."""
        return [record for parts in self.histories.values() for part in parts for record in part]

    def setting(self, *path: str) -> Any:
        """One key of the last process's configuration; None where it is not known."""
        value: Any = self.first.starts[-1].get("settings") if self.first.starts else None
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
    def doubts(self) -> tuple[str, ...]:
        """Tells, a sentence each, what the audit and checkpoints record and the ledgers lack."""
        audits = {records.rank: records for records in self.ranks}
        found: list[str] = []
        for rank in sorted({*audits, *self.checkpoints}):
            told = audits.get(rank, RankRecords(rank))
            settings = told.starts[-1].get("settings") if told.has_ended and told.starts else None
            found += doubts_of(
                rank,
                self.histories.get(rank, ()),
                self.ledgers.get(rank, ()),
                packs={
                    (step["step"], pack["pack_id"]) for step in told.steps.values() for pack in step["packs"]
                },
                ended_run=(settings or {}).get("run_id"),
                checkpoints=self.checkpoints.get(rank, ()),
            )
        return tuple(found)


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
    return RunData(
        run_dirs=tuple(run_dirs),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        ledgers=ledgers,
        histories=effective_histories(ledgers) if ledgers else {},
        checkpoints=_read_checkpoints(run_dirs),
    )


def _refuse_unrelated(run_dirs: Sequence[Path]) -> None:
    if len({each.resolve() for each in run_dirs}) < len(run_dirs):
        raise UserError(
            f"every directory must be named once, got {' '.join(map(str, run_dirs))}; leave one out"
        )
    if (stranger := _stranger(run_dirs)) is not None:
        raise UserError(
            "several directories are those of one run, each resumed from a checkpoint of those before it, oldest "
            f"first, got {stranger}, which resumed none of them; two runs are not compared any more: run report on "
            "each, and swift-stage2 evaluate --compare on their predictions"
        )


def _stranger(run_dirs: Sequence[Path]) -> Path | None:
    """The first directory, but for the very first, whose run did not resume a checkpoint of those before it."""
    if len(run_dirs) == 1:
        return None
    saved: set[str] = set()
    for number, run_dir in enumerate(run_dirs):
        ledgers = read_ledgers([run_dir]) if rank_files(run_dir, "ledger") else {}
        records = list(chain.from_iterable(ledgers.values()))
        if number and not _goes_on(run_dir, records, saved):
            return run_dir
        saved |= {record["save_id"] for record in records if record["kind"] == Entry.CHECKPOINT}
        saved |= {each.save_id for each in chain.from_iterable(_read_checkpoints([run_dir]).values())}
    return None


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
        content = json.loads(read_regular(path))
        step, saved = content["step"], content["state"]
        save_id, state = saved["save_id"], saved["learner"]["source"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    record = {"kind": Entry.CHECKPOINT, "step": step, "save_id": save_id, "state": state}
    return Checkpoint(path.parent.name, step, save_id, state) if has_form(record, LEDGER_FORMS) else None


def doubts_of(
    rank: int,
    history: Sequence[Process],
    ledger: Sequence[Record],
    *,
    packs: Set[tuple[int, str]] = frozenset(),
    ended_run: str | None = None,
    checkpoints: Sequence[Checkpoint] = (),
) -> Iterator[str]:
    """Sentences about one rank's ``ledger``, of which ``history`` counts.

    Each is written before what it is compared with: the ``packs`` that the audit tells of, as (step, pack); the end of
    the last process, ``ended_run``, if the audit tells an orderly one; the ``checkpoints`` on disk.
    """
    records = list(chain.from_iterable(history))
    trained = {(record["step"], record["pack_id"]) for record in records if record["kind"] == Entry.TRAINED}
    if missing := sorted(packs - trained):
        steps = sorted({step for step, _ in missing})
        yield (
            f"rank {rank}: the audit tells of {len(packs)} packs of channel B that steps trained, the ledger "
            f"lacks {len(missing)} of them, of {_named(steps)}"
        )
    if history and ended_run is not None and run_of(history[-1]) == ended_run:
        is_numbered = history[-1][0].get("sequence") is not None  # earlier releases told no end
        if is_numbered and history[-1][-1]["kind"] != Entry.END:
            yield f"rank {rank}: the audit tells that the run ended in order, the ledger ends before that"
    yield from _checkpoints(rank, checkpoints, records, ledger)


def _checkpoints(
    rank: int, checkpoints: Sequence[Checkpoint], records: Sequence[Record], ledger: Sequence[Record]
) -> Iterator[str]:
    first_step = min((record["step"] for record in ledger if record["kind"] == Entry.START), default=0)
    counted = {record["save_id"]: record for record in records if record["kind"] == Entry.CHECKPOINT}
    told = {record.get("save_id") for record in ledger if record["kind"] in (Entry.START, Entry.CHECKPOINT)}
    for checkpoint in checkpoints:
        record = counted.get(checkpoint.save_id)
        if record is None and checkpoint.save_id not in told and checkpoint.step > first_step:
            yield f"rank {rank}: {checkpoint.name} is of a save that the ledger does not tell of"
        elif record is not None and record["state"] != checkpoint.state:
            yield f"rank {rank}: {checkpoint.name} holds other samples in hand than the ledger tells"


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS_SHOWN]))
    more = len(steps) - _MOST_STEPS_SHOWN
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")
