"""Reads what a run's ranks wrote: lines of audit, ledger and recording, and which of them count.

Works on finished, killed and running runs, and on several directories of one run, oldest first. Records that a resume
made void, because its checkpoint did not cover them, do not count: those of the audit by step where they have one and
else by time, those of the ledger by the checkpoints that its processes resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import GAP, Record
from swift_stage2.telemetry.ledger import Entry
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, LEDGER_FORMS, has_form
from swift_stage2.whole_file import MOST_BYTES, open_regular, regular_lines

ContentT = TypeVar("ContentT")
Process = Sequence[Record]
"""All that one process wrote to a ledger; the first record is its ``start``, unless the ledger begins without one."""
_HEAD = b'{"kind":"'  # of every record
_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class RankRecords:
    """One rank's records as far as they count, in the order in which they were written."""

    rank: int
    steps: dict[int, Record] = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)
    catch_ups: list[Record] = field(default_factory=list)
    metrics: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    matches: list[Record] = field(default_factory=list)
    num_odd_matches: int = 0
    """Lines of its matches that are no record."""
    quarantines: list[Record] = field(default_factory=list)
    num_lost: int = 0
    """Records that a full disk did not take, and lines that are none or have not the form of their kind."""
    has_ended: bool = False
    """Whether the last process came to its orderly end."""
    void: list[tuple[float, float]] = field(default_factory=list)
    """Spans of Unix time whose records a resume made void."""

    def take(self, record: Record) -> None:
        if not has_form(record, AUDIT_FORMS):
            self.num_lost += 1
            return
        match record["kind"]:
            case "start":
                self._resume(record)
                self.starts.append(record)
                self.has_ended = False
            case "step":
                self.steps[record["step"]] = record
            case "round":
                self.rounds.append(record)
            case "catch_up":
                self.catch_ups.append(record)
            case "metrics":
                self.metrics.append(record)
                self.has_ended = record["step"] is None
            case "quarantine":
                self.quarantines.append(record)
            case "evaluation":
                self.evaluations.append(record)
            case "gap":
                self.num_lost += record["records_lost"]

    def is_void(self, time: object) -> bool:
        """Whether a record of that moment was made void; what is no moment was not."""
        return isinstance(time, int | float) and any(begin <= time < end for begin, end in self.void)

    def _resume(self, start: Record) -> None:
        step = start["step"]
        lost = [record["time"] for record in (*self.steps.values(), *self.rounds) if record["step"] >= step]
        self.steps = {number: record for number, record in self.steps.items() if number < step}
        self.rounds = [record for record in self.rounds if record["step"] < step]
        if lost:
            self.void.append((min(lost), start["time"]))
            for records in (self.catch_ups, self.metrics, self.evaluations, self.quarantines):
                records[:] = [record for record in records if record["time"] < min(lost)]


def record_of(line: bytes) -> Record | None:
    """The record that a line holds; None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _is_empty_gap(record: Record) -> bool:
    """Whether it is the room for a number of lost records, and none is lost."""
    return record["kind"] == GAP and record.get("records_lost") == 0


def read_lines(path: Path) -> tuple[list[Record], int]:
    """The records of one file as they were written, and how many lines are none.

    A last line without its end may still be written, and counts as neither.

    Raises:
        OSError: the file cannot be read.
    """
    lines = [(line, record_of(line)) for line in regular_lines(path)]
    records = [record for _, record in lines if record is not None and not _is_empty_gap(record)]
    return records, sum(record is None and line.endswith(b"\n") for line, record in lines)


def read_audit(path: Path) -> list[Record]:
    """The records of one file; lines that are no whole record, torn by a crash or a full disk, are dropped.

    Raises:
        OSError: the file cannot be read.
    """
    return read_lines(path)[0]


def read_ledger(path: Path) -> list[Record]:
    """The records of one file as they were written.

    Where a line is none, or has not the form of its kind: ``Entry.TORN`` if it could be the beginning of one, else a
    gap of one record.

    Raises:
        OSError: the file cannot be read.
    """
    records = [_ledger_record(line) for line in regular_lines(path) if line.strip()]
    return [record for record in records if not _is_empty_gap(record)]


def _ledger_record(line: bytes) -> Record:
    record = record_of(line)
    if record is not None and record["kind"] in LEDGER_FORMS and has_form(record, LEDGER_FORMS):
        return record
    if record is None and (line.startswith(_HEAD) or _HEAD.startswith(line.rstrip(b"\n"))):
        return {"kind": str(Entry.TORN)}
    return {"kind": GAP, "records_lost": 1}


def read_ranks(run_dirs: Sequence[Path]) -> dict[int, RankRecords]:
    """By rank, what counts of its audit; empty without one.

    Raises:
        UserError: a file cannot be read.
    """
    ranks: dict[int, RankRecords] = {}
    for rank, records, num_unreadable in read_files(run_dirs, "audit"):
        found = ranks.setdefault(rank, RankRecords(rank))
        for record in records:
            found.take(record)
        found.num_lost += num_unreadable
    return ranks


def read_files(run_dirs: Sequence[Path], folder: str) -> Iterator[tuple[int, list[Record], int]]:
    """Rank, records and number of unreadable lines of every file of one folder.

    Raises:
        UserError: a file cannot be read.
    """
    for run_dir in run_dirs:
        for rank, (records, num_unreadable) in _read_each(
            run_dir, folder, read_lines, f"a file in {folder}/"
        ):
            yield rank, records, num_unreadable


def read_ledgers(run_dirs: Sequence[Path]) -> dict[int, list[Record]]:
    """Every rank's records, those of the first directory first.

    Raises:
        UserError: a directory holds no ledger, or one of its files cannot be read.
    """
    ledgers: dict[int, list[Record]] = {}
    for run_dir in run_dirs:
        if not rank_files(run_dir, "ledger"):
            raise no_ledger(run_dir, "a report needs")
        for rank, records in _read_each(run_dir, "ledger", read_ledger, "a ledger"):
            ledgers.setdefault(rank, []).extend(records)
    return ledgers


def no_ledger(run_dir: Path, who: str) -> UserError:
    """That ``run_dir`` holds no ledger; ``who`` needs one."""
    inside = " or ".join(sorted(str(path.parent) for path in run_dir.glob("v*/ledger")))
    named = inside or "swift.output_dir (and in it the folder vN-DATE) of a run that had channel B"
    return UserError(
        f"{who} a run's directory with ledger/rank*.jsonl, got {run_dir}"
        f"{'' if run_dir.is_dir() else ', which is no directory'}; name {named}, with telemetry.audit: true"
    )


def rank_files(run_dir: Path, folder: str) -> list[Path]:
    return sorted((run_dir / folder).glob("rank*.jsonl"))


def rank_of(path: Path, what: str) -> int:
    """Whose file it is; ``what`` it is.

    Raises:
        UserError: its name does not tell, or it cannot be read.
    """
    try:
        with open_regular(path):
            return int(path.stem.removeprefix("rank"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, what, error) from error


def _read_each(
    run_dir: Path, folder: str, read: Callable[[Path], ContentT], what: str
) -> Iterator[tuple[int, ContentT]]:
    for path in rank_files(run_dir, folder):
        try:
            yield int(path.stem.removeprefix("rank")), read(path)
        except (OSError, ValueError) as error:
            raise _unreadable(path, what, error) from error


def _unreadable(path: Path, what: str, error: Exception) -> UserError:
    return UserError(
        f"{what} is rank<number>.jsonl and can be read, got path={path}: {error}; make it readable"
    )


def effective_histories(ledgers: Mapping[int, Sequence[Record]]) -> dict[int, list[Process]]:
    """By rank, what counts of each process's records, oldest first."""
    processes = {rank: split_by_process(records) for rank, records in sorted(ledgers.items())}
    # A process that some rank never began cannot have trained, for every step is agreed on by all.
    common = set.intersection(*({run_of(process) for process in every} for every in processes.values()))
    return {
        rank: effective_history([process for process in every if run_of(process) in common])
        for rank, every in processes.items()
    }


def split_by_process(records: Sequence[Record]) -> list[Process]:
    """The processes of a ledger, oldest first."""
    begins = [index for index, record in enumerate(records) if record["kind"] == Entry.START]
    bounds = [0, *(index for index in begins if index), len(records)]
    return [records[begin:end] for begin, end in pairwise(bounds) if records[begin:end]]


def run_of(process: Process) -> str | None:
    """The id that the run's ranks agreed on; None for a process without a ``start``."""
    return process[0].get("run_id")


def num_generations_of(start: Record) -> int:
    """Rollouts of one group, as a ledger's ``start`` has it: 1 without groups."""
    return (start.get("state") or {}).get("num_generations") or 1


def effective_history(processes: Sequence[Process]) -> list[Process]:
    """The records of each process that count, oldest first: those on the way to where the last process stands.

    Each process's records begin with its ``start``. Without the checkpoint that it names, nothing before counts.
    """
    history: list[Process] = []
    number, end = len(processes) - 1, None
    while number >= 0:
        part = processes[number][:end]
        history.append(part)
        save_id = part[0].get("save_id") if part else None
        found = _find_checkpoint(processes[:number], save_id) if save_id else None
        number, end = found or (-1, None)
    return history[::-1]


def _find_checkpoint(processes: Sequence[Process], save_id: str) -> tuple[int, int] | None:
    """(process, number of its records up to and with the checkpoint)."""
    for number in reversed(range(len(processes))):
        for index, record in enumerate(processes[number]):
            if record["kind"] == Entry.CHECKPOINT and record["save_id"] == save_id:
                return number, index + 1
    return None


class AuditTail:
    """One growing file, read from where the last look ended. The file may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Record]:
        """The records with a time that have become whole since the last call."""
        return list(self.stream())

    def stream(self) -> Iterator[Record]:
        """The same, of which few are held at a time; a further call goes on behind the last chunk that was begun."""
        while lines := self._next_lines():
            records = (record_of(line) for line in lines)
            yield from (
                each for each in records if each is not None and isinstance(each.get("time"), int | float)
            )

    def _next_lines(self) -> list[bytes]:
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                data = file.read(_CHUNK_BYTES) + file.readline(MOST_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


@dataclass(slots=True)
class Numbering:
    """Counts the records that a ledger lacks, by the numbers of the others.

    Each process numbers its records from 0; those of earlier releases have no number.
    """

    num_missing: int = 0
    _next: int = 0

    def take(self, record: Record) -> None:
        sequence = record.get("sequence")
        if sequence is None:
            return
        expected = 0 if record["kind"] == Entry.START else self._next
        self.num_missing += max(0, sequence - expected)
        self._next = max(expected, sequence + 1)
