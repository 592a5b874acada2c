"""Reads what a run left behind: audits, ledgers and matches of every rank, without what a resume made void.

Works on finished, killed and running runs, and on several directories of one run, oldest first. A resumed run's
records that its checkpoint did not cover are left out, by step where they have one and else by time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from swift_stage2.errors import UserError
from swift_stage2.telemetry.audit import GAP, Record, read_audit
from swift_stage2.telemetry.ledger import read_ledgers
from swift_stage2.telemetry.ledger_account import effective_histories


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
    num_lost: int = 0
    has_ended: bool = False
    """Whether the last process came to its orderly end."""
    void: list[tuple[float, float]] = field(default_factory=list)
    """Spans of Unix time whose records a resume made void."""

    def take(self, record: Record) -> None:
        """Adds the next record of the audit."""
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
            case "evaluation":
                self.evaluations.append(record)
            case kind if kind == GAP:
                self.num_lost += record["records_lost"]

    def until(self, time: float) -> RankRecords:
        """The same without the steps that were planned later."""
        return replace(
            self, steps={number: step for number, step in self.steps.items() if step["time"] <= time}
        )

    def is_void(self, time: float) -> bool:
        """Whether a record of that moment was made void."""
        return any(begin <= time < end for begin, end in self.void)

    def _resume(self, start: Record) -> None:
        step = start["step"]
        lost = [record["time"] for record in (*self.steps.values(), *self.rounds) if record["step"] >= step]
        self.steps = {number: record for number, record in self.steps.items() if number < step}
        self.rounds = [record for record in self.rounds if record["step"] < step]
        if lost:
            self.void.append((min(lost), start["time"]))
            self.metrics = [record for record in self.metrics if record["time"] < min(lost)]
            self.evaluations = [record for record in self.evaluations if record["time"] < min(lost)]


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

    @property
    def wanted_b(self) -> bool:
        """Whether any step wanted channel B."""
        return self.first is not None and any(step["wants_b"] for step in self.first.steps.values())


def read_run(run_dirs: Sequence[Path]) -> RunData:
    """Everything under these directories.

    Raises:
        UserError: there is neither a ledger nor an audit, or a file cannot be read.
    """
    ranks = _read_ranks(run_dirs)
    # A directory without an audit is asked for its ledger too, so that what it lacks is told.
    asked = [run_dir for run_dir in run_dirs if _files(run_dir, "ledger") or not _files(run_dir, "audit")]
    ledgers = read_ledgers(asked) if asked else {}
    histories = effective_histories(ledgers) if ledgers else {}
    return RunData(
        run_dirs=tuple(run_dirs),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        ledgers=ledgers,
        histories={rank: tuple(chain.from_iterable(parts)) for rank, parts in histories.items()},
    )


def _read_ranks(run_dirs: Sequence[Path]) -> dict[int, RankRecords]:
    ranks: dict[int, RankRecords] = {}
    for rank, records in _read(run_dirs, "audit"):
        for record in records:
            ranks.setdefault(rank, RankRecords(rank)).take(record)
    for rank, records in _read(run_dirs, "matches"):
        found = ranks.setdefault(rank, RankRecords(rank))
        found.matches.extend(
            record for record in records if record["kind"] == "match" and not found.is_void(record["time"])
        )
    return ranks


def _read(run_dirs: Sequence[Path], folder: str) -> Iterator[tuple[int, list[Record]]]:
    for path in chain.from_iterable(_files(run_dir, folder) for run_dir in run_dirs):
        try:
            yield int(path.stem.removeprefix("rank")), read_audit(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"a file in {folder}/ is rank<number>.jsonl and can be read, got path={path}: {error}; make it readable"
            ) from error


def _files(run_dir: Path, folder: str) -> list[Path]:
    return sorted((run_dir / folder).glob("rank*.jsonl"))
