"""Finished rollouts of all ranks, read from files that the learner writes anyway, while it runs or later.

A rollout is finished when it has been matched: the ledger's ``matched`` record tells of it, once, and ``sent`` named
its server before. Its text is taken from the recording, which holds all of them, or from the matches of a few rows.
Files only grow, so each is read from where the last look ended. A line without its end is waited for: who writes it
ends it, or was killed, and then the next process steps over it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from swift_stage2.errors import UserError
from swift_stage2.records import match_ratios
from swift_stage2.report.matches import EVALUATION, match_of
from swift_stage2.telemetry.audit import Record, audit_path
from swift_stage2.telemetry.ledger import Entry, RecordEntry, ledger_path, matches_path, record_path
from swift_stage2.telemetry.ledger_account import Key, Place, ledger_key
from swift_stage2.telemetry.reading import (
    AuditTail,
    Numbering,
    no_ledger,
    num_generations_of,
    rank_files,
    rank_of,
)
from swift_stage2.telemetry.record_forms import AUDIT_FORMS, LEDGER_FORMS, RECORD_FORMS, has_form

_WHO = "rollouts are read from"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """One rollout, as the ledger tells of it."""

    rollout: str
    """Its name, of which a run has no second one: run id, rank, epoch, position and attempt."""
    time: float
    """When it was matched, in Unix seconds."""
    run_id: str
    """Of the process of the run: a resumed one has another."""
    rank: int
    version: int
    """The oldest that any of its tokens was sampled under."""
    epoch: int
    position: int
    """In the rank's shard of the epoch."""
    row: int
    """Of the data set, among those that channel B uses."""
    group: str | None
    """Rank, epoch and number of its group: of the rollouts that are compared with it. None in a run without groups."""
    attempt: int
    server: str | None
    """That answered, or the merger in front of it; None where the ledger does not tell."""
    num_tokens: int
    truncated: bool
    pairs: int
    """Predictions that were matched to ground truth."""
    false: int
    """Predictions without a partner."""
    missed: int
    """Ground truth without a partner."""
    mean_iou: float | None
    """Of the pairs; None without any."""
    likeness: str
    """The task's word for what that is a mean of: IoU, or closeness of points."""
    dropped: Mapping[str, int]
    """Objects that the parser dropped, by reason."""
    reward: Mapping[str, float]
    """The task's terms and their ``total``; empty of a run that an earlier release wrote."""
    text: str | None
    """The answer; None where it was not recorded."""


class RunRollouts:
    """The finished rollouts of one run, read on and on."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._ranks: dict[int, _RankRollouts] = {}
        self._audit = AuditTail(audit_path(run_dir, 0))
        self._has_b = True

    @property
    def has_begun(self) -> bool:
        """Whether a rank has begun its ledger; False also where there is no run."""
        return bool(rank_files(self._run_dir, "ledger"))

    def require_begun(self, *, may_come: bool) -> None:
        """Returns where there are rollouts to read, or where the first of them ``may_come``.

        Raises:
            UserError: there is no run, or none with channel B and a ledger.
        """
        if self.has_begun:
            return
        for record in self._audit.stream():
            if record["kind"] == "start" and has_form(record, AUDIT_FORMS):
                self._has_b = record.get("queue_limit") is not None
        if not self._has_b:
            raise UserError(
                f"{_WHO} a run with channel B, got {self._run_dir}, whose run has none; name the directory of another "
                "run, or set stage2_ab.schedule.b_ratio above 0"
            )
        if not may_come:
            raise no_ledger(self._run_dir, _WHO)

    def read(self) -> Iterator[FinishedRollout]:
        """Those that have become known since the last call, by time; to be read to its end.

        Raises:
            UserError: a ledger cannot be read.
        """
        for path in rank_files(self._run_dir, "ledger"):
            rank = rank_of(path, "a ledger")
            if rank not in self._ranks:
                self._ranks[rank] = _RankRollouts(self._run_dir, rank)
        return heapq.merge(*(each.read() for each in self._ranks.values()), key=attrgetter("time"))

    @property
    def doubts(self) -> Sequence[str]:
        """Why rollouts of a run that no process works on may be missing; empty if none is."""
        newest: Record = max((each.start for each in self._ranks.values()), key=lambda start: start["time"])
        found = []
        for rank in sorted({*range(newest.get("world_size") or 1), *self._ranks}):
            told = self._ranks.get(rank)
            if told is None or not told.has_ended or told.start.get("run_id") != newest.get("run_id"):
                found.append(f"rank {rank} told no end: it was killed, or a full disk took no more")
            if told is not None and told.num_missing:
                found.append(f"rank {rank}: {told.num_missing} records of its ledger are missing or damaged")
        return found


class _RankRollouts:
    def __init__(self, run_dir: Path, rank: int) -> None:
        self._rank = rank
        self._ledger = AuditTail(ledger_path(run_dir, rank))
        self._texts = (
            _Texts(record_path(run_dir, rank), _completion),
            _Texts(matches_path(run_dir, rank), _match),
        )
        self._servers: dict[Place, str | None] = {}  # of samples in hand
        self._numbering = Numbering()
        self.start: Record = {"time": 0.0}
        """Of its last process."""
        self.has_ended = False
        """Whether that process came to its orderly end."""

    @property
    def num_missing(self) -> int:
        return self._numbering.num_missing

    def read(self) -> Iterator[FinishedRollout]:
        for record in self._ledger.stream():
            if record["kind"] not in LEDGER_FORMS or not has_form(record, LEDGER_FORMS):
                continue  # its number is missing
            self._numbering.take(record)
            self.has_ended = record["kind"] == Entry.END
            match record["kind"]:
                case Entry.START:
                    self.start = record
                    self._servers.clear()
                case Entry.SENT:
                    for sample in record["samples"]:
                        self._servers[ledger_key(sample)[:2]] = record.get("server")
                case Entry.RETURNED | Entry.QUARANTINED:
                    for sample in record["samples"]:
                        self._servers.pop(ledger_key(sample)[:2], None)
                case Entry.MATCHED:
                    for sample in record["samples"]:
                        yield self._rollout(record, ledger_key(sample))

    def _rollout(self, record: Record, key: Key) -> FinishedRollout:
        epoch, position, row, attempt = key
        run_id, quality = self.start.get("run_id") or "", record["quality"]
        num_generations = num_generations_of(self.start)
        pairs, predictions = quality["num_pairs"], quality["num_predictions"]
        counts = {
            name: quality[name] for name in ("num_predictions", "num_ground_truth", "num_pairs", "sum_iou")
        }
        texts = (each.find(key, self.start["time"], record["time"]) for each in self._texts)
        return FinishedRollout(
            rollout=f"{run_id}:{self._rank}:{epoch}:{position}:{attempt}",
            time=record["time"],
            run_id=run_id,
            rank=self._rank,
            version=record["version"],
            epoch=epoch,
            position=position,
            row=row,
            group=f"{self._rank}:{epoch}:{position // num_generations}" if num_generations > 1 else None,
            attempt=attempt,
            server=self._servers.pop(key[:2], None),
            num_tokens=record["num_rollout_tokens"],
            truncated=bool(quality.get("num_truncated")),
            pairs=pairs,
            false=max(0, predictions - pairs),
            missed=max(0, quality["num_ground_truth"] - pairs),
            mean_iou=match_ratios(**counts).get("mean_iou"),
            likeness=word if (word := self.start.get("likeness")) and word.isprintable() else "IoU",
            dropped=quality.get("dropped") or {},
            reward=quality.get("reward") or {},
            text=next((text for text in texts if text is not None), None),
        )


class _Texts:
    """One rank's answers that were written down in one file, read no further than they are asked for."""

    def __init__(self, path: Path, answer_of: Callable[[Record], tuple[Key, str] | None]) -> None:
        self._tail = AuditTail(path)
        self._answer_of = answer_of
        self._stream = self._tail.stream()
        self._ahead: Record | None = None
        self._found: dict[Key, tuple[float, str]] = {}

    def find(self, key: Key, since: float, until: float) -> str | None:
        """The last answer to ``key`` between two moments; ``until`` never goes back."""
        while (record := self._next()) is not None and record["time"] <= until:
            self._ahead = None
            if (answer := self._answer_of(record)) is not None:
                self._found[answer[0]] = record["time"], answer[1]
        time, text = self._found.pop(key, (0.0, None))
        return text if time >= since else None

    def _next(self) -> Record | None:
        if self._ahead is None:
            self._ahead = next(self._stream, None)
        if self._ahead is None:  # there may be more by now
            self._stream = self._tail.stream()
            self._ahead = next(self._stream, None)
        return self._ahead


def _completion(record: Record) -> tuple[Key, str] | None:
    if record["kind"] != RecordEntry.COMPLETION or not has_form(record, RECORD_FORMS):
        return None
    return ledger_key(record["sample"]), record["text"]


def _match(record: Record) -> tuple[Key, str] | None:
    try:
        match = match_of(record)
    except (ValueError, OverflowError):
        return None
    return None if match.purpose == EVALUATION else (match.sample, match.rollout)
