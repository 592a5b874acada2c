"""Reads the audits of a run, rank by rank, without what a resume made void.

Works on finished, killed and running runs, and on several directories of one run, oldest first. A resumed run's
records that its checkpoint did not cover are left out, by step where they have one and else by time, as the
counters leave them out. Called by the summary and by ``report``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import GAP, Record, read_lines
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, has_form


@dataclass(slots=True)
class RankRecords:
    """One rank's records as far as they count, in the order in which they were written."""

    rank: int
    steps: dict[int, Record] = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)
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
        """Adds the next record of the audit."""
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
            case "metrics":
                self.metrics.append(record)
                self.has_ended = record["step"] is None
            case "quarantine":
                self.quarantines.append(record)
            case "evaluation":
                self.evaluations.append(record)
            case kind if kind == GAP:
                self.num_lost += record["records_lost"]

    @property
    def ended_run(self) -> str | None:
        """The id of the last process, if it came to its orderly end."""
        run_id = (self.starts[-1].get("settings") or {}).get("run_id") if self.starts else None
        return run_id if self.has_ended and isinstance(run_id, str) else None

    def until(self, time: float) -> RankRecords:
        """The same without the steps that were planned later."""
        return replace(
            self, steps={number: step for number, step in self.steps.items() if step["time"] <= time}
        )

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
            self.metrics = [record for record in self.metrics if record["time"] < min(lost)]
            self.evaluations = [record for record in self.evaluations if record["time"] < min(lost)]
            self.quarantines = [record for record in self.quarantines if record["time"] < min(lost)]


def read_ranks(run_dirs: Sequence[Path]) -> dict[int, RankRecords]:
    """What counts of every rank's audit; empty without one.

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
    for path in chain.from_iterable(rank_files(run_dir, folder) for run_dir in run_dirs):
        try:
            records, num_unreadable = read_lines(path)
            yield int(path.stem.removeprefix("rank")), records, num_unreadable
        except (OSError, ValueError) as error:
            raise UserError(
                f"a file in {folder}/ is rank<number>.jsonl and can be read, got path={path}: {error}; make it readable"
            ) from error


def rank_files(run_dir: Path, folder: str) -> list[Path]:
    """The ranks' files in one folder of a run."""
    return sorted((run_dir / folder).glob("rank*.jsonl"))
